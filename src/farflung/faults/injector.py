"""Injects the faults of a plan, and tracks the active faults of links and replicas."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from farflung.faults.plan import LINK_KINDS, Fault, FaultPlan
from farflung.telemetry import Event

__all__ = ["ActiveFaults", "FaultEnvironment", "FaultInjector", "LinkCondition"]

MAX_NAMED_FAULTS = 3
"""Number of faults that a warning names; it counts the others."""


@dataclass(frozen=True, slots=True)
class LinkCondition:
    """Effect of faults on a link, in one direction; by default none.

    Args:
      is_cut: If True, nothing arrives, and nobody is notified.
      loss: Share of packets lost, besides the network's own losses.
      bandwidth_bps: Limit in bits per second, besides the network's own limits.
    """

    is_cut: bool = False
    loss: float = 0.0
    bandwidth_bps: float = math.inf

    def with_fault(self, fault: Fault) -> LinkCondition:
        """Returns the condition after one more fault of ``cut``, ``throttle`` or ``lose``."""
        if fault.kind == "cut":
            return replace(self, is_cut=True)
        if fault.bandwidth_bps is not None:
            return replace(self, bandwidth_bps=fault.bandwidth_bps)
        assert fault.loss is not None
        return replace(self, loss=fault.loss)


FaultTarget: TypeAlias = "tuple[int, int] | int"
"""Link from one rank to another, or a replica."""


class ActiveFaults:
    """Faults that have begun and not ended. The last of a kind applies; when it ends, the one before applies again.

    Args:
      size: Number of replicas.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._faults: dict[FaultTarget, list[Fault]] = {}

    def add(self, fault: Fault) -> None:
        """Adds a fault of :data:`farflung.faults.TEMPORARY_KINDS`; a ``restore`` clears its targets."""
        for target in self._iter_targets(fault):
            active = self._faults.setdefault(target, [])
            if fault.kind == "restore":
                active.clear()
            else:
                active.append(fault)

    def remove(self, fault: Fault) -> None:
        """Removes a fault whose time is over; does nothing if it was restored before."""
        for target in self._iter_targets(fault):
            active = self._faults.get(target, [])
            if fault in active:
                active.remove(fault)

    def get_condition(self, src: int, dst: int) -> LinkCondition:
        """Returns the condition of the link from one rank to another."""
        condition = LinkCondition()
        for fault in self._faults.get((src, dst), ()):
            condition = condition.with_fault(fault)
        return condition

    def get_slowdown(self, rank: int) -> float:
        """Returns the factor of a replica's computing time; 1 without a fault."""
        active = self._faults.get(rank)
        factors = [fault.factor for fault in active if fault.factor is not None] if active else []
        return factors[-1] if factors else 1.0

    def is_hung(self, rank: int) -> bool:
        """Returns True if a replica is suspended."""
        return any(fault.kind == "hang" for fault in self._faults.get(rank, ()))

    def is_permanently_hung(self, rank: int) -> bool:
        """Returns True if a replica is suspended by a fault without an end."""
        return any(fault.kind == "hang" and fault.for_s is None for fault in self._faults.get(rank, ()))

    def _iter_targets(self, fault: Fault) -> Iterator[FaultTarget]:
        if fault.kind in LINK_KINDS:
            yield from fault.iter_links(self._size)
        if fault.kind not in LINK_KINDS or (fault.kind == "restore" and fault.peer is None):
            yield fault.rank


class FaultEnvironment:
    """Environment in which faults happen: replicas, and the links between them.

    Args:
      size: Number of replicas.
    """

    def __init__(self, size: int) -> None:
        self.size, self.active_faults = size, ActiveFaults(size)

    def read_clock(self) -> float:
        """Returns the seconds since the first step began."""
        raise NotImplementedError

    def call_at(self, time_s: float, fn: Callable[[], None]) -> None:
        """Calls ``fn`` at ``time_s`` seconds after the start of the first step."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Returns True once every remaining replica has ended."""
        raise NotImplementedError

    def crash(self, rank: int) -> None:
        """Terminates a replica immediately."""
        raise NotImplementedError

    def leave(self, rank: int) -> None:
        """Makes a replica announce its leave and end."""
        raise NotImplementedError

    def join(self, rank: int) -> None:
        """Admits a replica; does nothing if it is present."""
        raise NotImplementedError

    def reset(self, rank: int, peer: int) -> None:
        """Closes the connections of a replica to a peer, at the replica's end."""
        raise NotImplementedError

    def set_condition(self, src: int, dst: int, previous: LinkCondition, condition: LinkCondition) -> None:
        """Sets the condition of the link from one rank to another."""
        raise NotImplementedError

    def set_hung(self, rank: int, is_hung: bool) -> None:
        """Suspends or resumes a replica."""
        raise NotImplementedError

    def inject(self, fault: Fault) -> None:
        """Injects a fault immediately; the caller ends a temporary one by :meth:`revert`."""
        replica_actions = {"crash": self.crash, "leave": self.leave, "join": self.join}
        if fault.kind in replica_actions:
            replica_actions[fault.kind](fault.rank)
        elif fault.kind == "reset":
            for link in fault.iter_links(self.size):
                self.reset(*link)
        else:
            self._apply_change(fault, self.active_faults.add)

    def revert(self, fault: Fault) -> None:
        """Reverts a fault whose time is over."""
        self._apply_change(fault, self.active_faults.remove)

    def _apply_change(self, fault: Fault, update: Callable[[Fault], None]) -> None:
        """Applies the effects of a fault's beginning or end to the replica and its links."""
        standing, rank, links = self.active_faults, fault.rank, list(fault.iter_links(self.size))
        was_hung, conditions = standing.is_hung(rank), [standing.get_condition(*link) for link in links]
        update(fault)
        for link, previous in zip(links, conditions, strict=True):
            if (condition := standing.get_condition(*link)) != previous:
                self.set_condition(*link, previous, condition)
        if standing.is_hung(rank) != was_hung:
            self.set_hung(rank, not was_hung)


class FaultInjector:
    """Event sink that injects the faults of a plan at their times, or after a replica's given number of steps.

    Args:
      plan: Faults to inject.
      environment: Environment of the replicas.
    """

    def __init__(self, plan: FaultPlan, environment: FaultEnvironment) -> None:
        self._plan, self._environment = plan, environment
        self._injected: set[Fault] = set()
        self._pending: dict[tuple[int, int], list[Fault]] = {}
        for fault in plan.faults:
            if fault.at_step is not None:
                watched_rank = 0 if fault.kind == "join" else fault.rank
                self._pending.setdefault((watched_rank, fault.at_step), []).append(fault)
            elif fault.at_s is not None:
                environment.call_at(fault.at_s, lambda fault=fault: self._inject_and_schedule_end(fault))  # type: ignore[misc]

    def __call__(self, event: Event) -> None:
        """Handles one event of one replica."""
        if event["event"] not in ("begin", "step"):
            return
        steps_done = int(str(event["step"])) + (event["event"] == "step")
        for fault in self._pending.pop((int(str(event["rank"])), steps_done), ()):
            self._inject_and_schedule_end(fault)

    @property
    def missed_faults(self) -> tuple[Fault, ...]:
        """Faults that have not been injected, or only after the end of the run."""
        return tuple(fault for fault in self._plan.faults if fault not in self._injected)

    def warn_of_missed_faults(self) -> None:
        """Warns of the faults that were not injected before the end of the run."""
        if not self.missed_faults:
            return
        names = ", ".join(map(str, self.missed_faults[:MAX_NAMED_FAULTS]))
        suffix = (
            f" and {len(self.missed_faults) - MAX_NAMED_FAULTS} more"
            if len(self.missed_faults) > MAX_NAMED_FAULTS
            else ""
        )
        logging.getLogger("farflung").warning(
            "%s of %s faults never struck, for the run or their replica had ended: %s%s",
            len(self.missed_faults),
            len(self._plan.faults),
            names,
            suffix,
        )

    def _inject_and_schedule_end(self, fault: Fault) -> None:
        if not self._environment.is_over():
            self._injected.add(fault)
        self._environment.inject(fault)
        if fault.for_s is not None:
            self._environment.call_at(
                self._environment.read_clock() + fault.for_s, lambda: self._environment.revert(fault)
            )
