"""Faults in a lab, which hit processes and links without notice."""

from __future__ import annotations

import heapq
import math
import signal
import time
from collections.abc import Callable
from itertools import count

from typing_extensions import override

from farflung.errors import ConfigError
from farflung.faults import FaultEnvironment, FaultInjector, FaultPlan, LinkCondition
from farflung.lab.lab import Lab
from farflung.telemetry import Event

__all__ = ["SUPPORTED_FAULTS", "LabEnvironment", "check_fault_plan"]

SUPPORTED_FAULTS = frozenset({"crash", "hang", "leave", "cut", "reset", "throttle", "lose", "restore"})
"""Kinds of faults that a lab supports."""


def check_fault_plan(plan: FaultPlan, nodes: int, *, reports_steps: bool) -> None:
    """Checks that a lab can carry out a plan.

    Args:
      plan: Fault plan.
      nodes: Number of nodes.
      reports_steps: True if workers report their events.

    Raises:
      Unsupported: The plan has a kind of fault that a lab lacks.
      ConfigError: The plan names an unknown rank, or a step though workers report none.
    """
    plan.check(nodes, SUPPORTED_FAULTS, "a lab")
    for fault in plan.faults:
        if fault.at_step is not None and not reports_steps:
            raise ConfigError(f"{fault}: at_step requires farflung train, which reports steps; use at_s")


class LabEnvironment(FaultEnvironment):
    """Fault environment of a lab, which carries out a plan on real processes and links.

    ``crash`` kills every process of a node, whose kernel then closes their connections; ``hang`` stops them
    with their connections open; ``leave`` sends them SIGUSR1, by which a replica of an elastic run leaves;
    ``reset`` closes connections at both ends; ``cut`` loses all packets and ``lose`` a share of them, without
    notice to either end; ``throttle`` delays packets; ``restore``, or the end of a fault's own time, reverts
    all but a crash, a leave and a reset.

    Args:
      lab: Lab to act on.
      plan: Fault plan.
      has_events: True if workers report events. Then times count from the first step of the first worker, and
        no fault happens before; otherwise from the creation of this object.

    Raises:
      Unsupported, ConfigError: See :func:`check_fault_plan`.
    """

    def __init__(self, lab: Lab, plan: FaultPlan, *, has_events: bool) -> None:
        check_fault_plan(plan, lab.nodes, reports_steps=has_events)
        super().__init__(lab.nodes)
        self._lab = lab
        self._origin = math.inf if has_events else time.monotonic()
        self.first_steps_s: dict[int, float] = {}
        """Start of each worker's first step, once reported, on the machine's monotonic clock."""
        self._callbacks: list[tuple[float, int, Callable[[], None]]] = []
        self._order = count()
        self.injector = FaultInjector(plan, self)

    @override
    def read_clock(self) -> float:
        """Returns seconds since the first step began; negative before."""
        return time.monotonic() - self._origin

    @override
    def call_at(self, time_s: float, fn: Callable[[], None]) -> None:
        heapq.heappush(self._callbacks, (time_s, next(self._order), fn))

    def handle_event(self, event: Event) -> None:
        """Handles one event of one worker."""
        if event["event"] == "begin":
            time_s = self.first_steps_s[int(str(event["rank"]))] = time.monotonic()
            self._origin = min(self._origin, time_s)
        self.injector(event)

    def get_next_time(self) -> float:
        """Returns the time of the next callback, on the machine's monotonic clock."""
        return self._origin + self._callbacks[0][0] if self._callbacks else math.inf

    def run_due(self) -> None:
        """Runs the callbacks that are due."""
        while self.get_next_time() <= time.monotonic():
            heapq.heappop(self._callbacks)[2]()

    @override
    def crash(self, rank: int) -> None:
        self._lab.kill(rank)

    @override
    def leave(self, rank: int) -> None:
        self._lab.send_signal(rank, signal.SIGUSR1)

    @override
    def reset(self, rank: int, peer: int) -> None:
        self._lab.reset(rank, peer)

    @override
    def set_condition(self, src: int, dst: int, previous: LinkCondition, condition: LinkCondition) -> None:
        self._lab.set_condition(src, dst, condition)

    @override
    def set_hung(self, rank: int, is_hung: bool) -> None:
        self._lab.send_signal(rank, signal.SIGSTOP if is_hung else signal.SIGCONT)

    @override
    def is_over(self) -> bool:
        return all(child is None or child.exit_code is not None for child in self._lab.workers)

    def is_permanently_hung(self) -> bool:
        """Returns True if every running worker hangs, and no fault's end or restore will resume it."""
        restorable = {
            fault.rank
            for fault in self.injector.missed_faults
            if (fault.kind, fault.peer) == ("restore", None) and fault.at_s is not None
        }
        running = [
            node
            for node, child in enumerate(self._lab.workers)
            if child is not None and child.exit_code is None
        ]
        return all(
            self.active_faults.is_permanently_hung(node) and node not in restorable for node in running
        )
