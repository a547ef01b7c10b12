"""Makes a plan come true: at its times by the world's clock, at its steps by what the replicas tell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from farflung.faults.plan import Fault, FaultPlan
from farflung.telemetry import Event

__all__ = ["FaultInjector", "Stage"]


class Stage(Protocol):
    """A world in which things go wrong."""

    def now(self) -> float:
        """Seconds since the first step began."""
        ...

    def at(self, t: float, fn: Callable[[], None]) -> None:
        """Calls ``fn`` when ``t`` seconds have passed since then."""
        ...

    def strike(self, fault: Fault) -> None:
        """Makes a fault happen, now."""
        ...

    def undo(self, fault: Fault) -> None:
        """The time of a fault that has happened is over."""
        ...


class FaultInjector:
    """A sink for the events of all replicas, which strikes when a replica has done its steps.

    Args:
      plan: what goes wrong.
      stage: where.
    """

    def __init__(self, plan: FaultPlan, stage: Stage) -> None:
        self._stage = stage
        self._waiting: dict[tuple[int, int], list[Fault]] = {}
        for fault in plan.faults:
            if fault.at_step is not None:
                told = 0 if fault.kind == "join" else fault.rank
                self._waiting.setdefault((told, fault.at_step), []).append(fault)
            elif fault.at_s is not None:
                stage.at(fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def __call__(self, event: Event) -> None:
        """Takes in one event of one replica."""
        if event["event"] not in ("begin", "step"):
            return
        done = int(str(event["step"])) + (event["event"] == "step")
        for fault in self._waiting.pop((int(str(event["rank"])), done), ()):
            self._strike(fault)

    def _strike(self, fault: Fault) -> None:
        self._stage.strike(fault)
        if fault.for_s is not None:
            self._stage.at(self._stage.now() + fault.for_s, lambda: self._stage.undo(fault))
