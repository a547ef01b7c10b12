"""Faults in a lab: they strike processes and links, and nobody is told."""

from __future__ import annotations

import heapq
import math
import signal
import time
from collections.abc import Callable

from farflung.faults import Fault, FaultInjector, FaultPlan
from farflung.lab.lab import Lab
from farflung.telemetry import Event

__all__ = ["CARRIED", "LabStage"]

CARRIED = frozenset({"crash", "hang", "cut", "throttle", "lose", "restore"})
"""The kinds of faults that a lab carries."""


class LabStage:
    """Makes a plan come true in a lab.

    ``crash`` kills every process of a node, whose kernel then closes their connections; ``hang`` stops them with their
    connections open; ``cut`` loses every packet and ``lose`` a share of them, without a word to either end;
    ``throttle`` has packets wait; ``restore`` undoes all but a crash.

    Args:
      lab: where.
      plan: what goes wrong.
      told: whether workers tell of their events; then times are counted from when rank 0's run began, otherwise from
        the moment this is made.

    Raises:
      ConfigError: a rank that there is not, or a kind of fault that a lab does not carry.
    """

    def __init__(self, lab: Lab, plan: FaultPlan, *, told: bool) -> None:
        plan.check(lab.nodes, CARRIED, "a lab")
        self._lab = lab
        self._origin = math.inf if told else time.monotonic()
        self._waiting: list[tuple[float, int, Callable[[], None]]] = []
        self._injector = FaultInjector(plan, self)

    def at(self, t: float, fn: Callable[[], None]) -> None:
        """Calls ``fn`` at a time of the run's clock, in seconds."""
        heapq.heappush(self._waiting, (t, len(self._waiting), fn))

    def hear(self, event: Event) -> None:
        """Takes in one event of one worker."""
        if event["event"] == "begin" and event["rank"] == 0:
            self._origin = time.monotonic() - float(str(event["t"]))
        self._injector(event)

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
        elif fault.kind == "hang":
            self._lab.signal(fault.rank, signal.SIGSTOP)
        else:
            for way in fault.ways(self._lab.nodes):
                self._lab.change(*way, self._lab.condition(*way).after(fault))
            if fault.kind == "restore" and fault.peer is None:
                self._lab.signal(fault.rank, signal.SIGCONT)
