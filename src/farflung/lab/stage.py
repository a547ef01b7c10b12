"""Faults in a lab: they strike processes and links without notice."""

from __future__ import annotations

import heapq
import math
import signal
import time
from collections.abc import Callable
from itertools import count

from typing_extensions import override

from farflung.errors import ConfigError
from farflung.faults import Condition, FaultInjector, FaultPlan, Stage
from farflung.lab.lab import Lab
from farflung.telemetry import Event

__all__ = ["CARRIED", "LabStage", "check_plan"]

CARRIED = frozenset({"crash", "hang", "leave", "cut", "reset", "throttle", "lose", "restore"})
"""The kinds of faults that a lab carries."""


def check_plan(plan: FaultPlan, nodes: int, *, told: bool) -> None:
    """Whether a lab can carry a plan.

    Args:
      plan: what goes wrong.
      nodes: how many there are.
      told: whether workers tell of their events.

    Raises:
      Unsupported: a kind of fault that it does not carry.
      ConfigError: a rank that there is not, or a step of workers that tell of none.
    """
    plan.check(nodes, CARRIED, "a lab")
    for fault in plan.faults:
        if fault.at_step is not None and not told:
            raise ConfigError(f"{fault}: at_step requires farflung train, which reports steps; use at_s")


class LabStage(Stage):
    """Makes a plan come true in a lab.

    ``crash`` kills every process of a node, whose kernel then closes their connections; ``hang`` stops them with their
    connections open; ``leave`` sends them SIGUSR1, by which a replica of an elastic run leaves; ``reset`` closes
    connections at both ends; ``cut`` loses all packets and ``lose`` a share of them, without a word to either end;
    ``throttle`` has packets wait; ``restore``, or the end of a fault's own time, undoes all but a crash, a leave and
    a reset.

    Args:
      lab: where.
      plan: what goes wrong.
      told: whether workers tell of their events; then times are counted from when the first of them begins its first
        step, and nothing goes wrong while they start. Otherwise from the moment this is made.

    Raises:
      Unsupported, ConfigError: as :func:`check_plan`.
    """

    def __init__(self, lab: Lab, plan: FaultPlan, *, told: bool) -> None:
        check_plan(plan, lab.nodes, told=told)
        super().__init__(lab.nodes)
        self._lab = lab
        self._origin = math.inf if told else time.monotonic()
        self.began: dict[int, float] = {}
        """When each worker that has told of it began its first step, on the machine's monotonic clock."""
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.injector = FaultInjector(plan, self)

    @override
    def now(self) -> float:
        """Seconds since the first step began; below 0 before."""
        return time.monotonic() - self._origin

    @override
    def at(self, t: float, fn: Callable[[], None]) -> None:
        heapq.heappush(self._waiting, (t, next(self._order), fn))

    def hear(self, event: Event) -> None:
        """Takes in one event of one worker."""
        if event["event"] == "begin":
            now = self.began[int(str(event["rank"]))] = time.monotonic()
            self._origin = min(self._origin, now)
        self.injector(event)

    def due(self) -> float:
        """When something happens next, on the machine's monotonic clock."""
        return self._origin + self._waiting[0][0] if self._waiting else math.inf

    def go_on(self) -> None:
        """Makes happen what is due."""
        while self.due() <= time.monotonic():
            heapq.heappop(self._waiting)[2]()

    @override
    def crash(self, rank: int) -> None:
        self._lab.kill(rank)

    @override
    def leave(self, rank: int) -> None:
        self._lab.signal(rank, signal.SIGUSR1)

    @override
    def reset(self, rank: int, peer: int) -> None:
        self._lab.reset(rank, peer)

    @override
    def change(self, src: int, dst: int, before: Condition, now: Condition) -> None:
        self._lab.change(src, dst, now)

    @override
    def hang(self, rank: int, hangs: bool) -> None:
        self._lab.signal(rank, signal.SIGSTOP if hangs else signal.SIGCONT)

    @override
    def is_over(self) -> bool:
        return all(child is None or child.exit_code is not None for child in self._lab.workers)

    def is_hung_for_good(self) -> bool:
        """Returns True where every worker that still runs hangs, and no fault's end or restore is to come for it."""
        restored = {
            fault.rank
            for fault in self.injector.missed
            if (fault.kind, fault.peer) == ("restore", None) and fault.at_s is not None
        }
        running = [
            node
            for node, child in enumerate(self._lab.workers)
            if child is not None and child.exit_code is None
        ]
        return all(self.standing.is_hung_for_good(node) and node not in restored for node in running)
