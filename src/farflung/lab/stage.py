"""Faults in a lab: they strike processes and links without notice."""

from __future__ import annotations

import heapq
import math
import signal
import time
from collections.abc import Callable
from itertools import count

from farflung.errors import ConfigError
from farflung.faults import Fault, FaultInjector, FaultPlan, Standing
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


class LabStage:
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
        self._lab, self._standing = lab, Standing(lab.nodes)
        self._origin = math.inf if told else time.monotonic()
        self.began: dict[int, float] = {}
        """When each worker that has told of it began its first step, on the machine's monotonic clock."""
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.injector = FaultInjector(plan, self)

    def now(self) -> float:
        """Seconds since the first step began; below 0 before."""
        return time.monotonic() - self._origin

    def at(self, t: float, fn: Callable[[], None]) -> None:
        """Calls ``fn`` when ``t`` seconds have passed since then."""
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

    def strike(self, fault: Fault) -> None:
        """Makes a fault happen, now."""
        if fault.kind == "crash":
            self._lab.kill(fault.rank)
        elif fault.kind == "leave":
            self._lab.signal(fault.rank, signal.SIGUSR1)
        elif fault.kind == "reset":
            for way in fault.ways(self._lab.nodes):
                self._lab.reset(*way)
        else:
            self._change(fault, self._standing.begin)

    def undo(self, fault: Fault) -> None:
        """The time of a fault is over."""
        self._change(fault, self._standing.end)

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
        return all(self._standing.is_hung_for_good(node) and node not in restored for node in running)

    def _change(self, fault: Fault, how: Callable[[Fault], None]) -> None:
        hung = self._standing.hangs(fault.rank)
        how(fault)
        for way in fault.ways(self._lab.nodes):
            condition = self._standing.condition(*way)
            if condition != self._lab.condition(*way):
                self._lab.change(*way, condition)
        if self._standing.hangs(fault.rank) != hung:
            self._lab.signal(fault.rank, signal.SIGCONT if hung else signal.SIGSTOP)
