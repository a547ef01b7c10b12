"""Injects the faults of a plan, and tracks the active faults of links and replicas."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from farflung.faults.plan import BETWEEN_TWO, Fault, FaultPlan
from farflung.telemetry import Event

__all__ = ["Condition", "FaultInjector", "Stage", "Standing"]

NAMED = 3
"""Number of faults that a warning names; it counts the others."""


@dataclass(frozen=True, slots=True)
class Condition:
    """Effect of faults on a link, in one direction; by default none.

    Args:
      is_cut: If True, nothing arrives, and nobody is notified.
      loss: Share of packets lost, besides the network's own losses.
      bandwidth_bps: Limit in bits per second, besides the network's own limits.
    """

    cut: bool = False
    loss: float = 0.0
    bandwidth_bps: float = math.inf

    def after(self, fault: Fault) -> Condition:
        """Returns the condition after one more fault of ``cut``, ``throttle`` or ``lose``."""
        if fault.kind == "cut":
            return replace(self, cut=True)
        if fault.bandwidth_bps is not None:
            return replace(self, bandwidth_bps=fault.bandwidth_bps)
        assert fault.loss is not None
        return replace(self, loss=fault.loss)


Struck: TypeAlias = "tuple[int, int] | int"
"""Link from one rank to another, or a replica."""


class Standing:
    """Faults that have begun and not ended. The last of a kind applies; when it ends, the one before applies again.

    Args:
      size: Number of replicas.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: dict[Struck, list[Fault]] = {}

    def begin(self, fault: Fault) -> None:
        """Adds a fault of :data:`farflung.faults.TEMPORARY_KINDS`; a ``restore`` clears its targets."""
        for target in self._concerned(fault):
            active = self._held.setdefault(target, [])
            if fault.kind == "restore":
                active.clear()
            else:
                active.append(fault)

    def end(self, fault: Fault) -> None:
        """Removes a fault whose time is over; does nothing if it was restored before."""
        for target in self._concerned(fault):
            active = self._held.get(target, [])
            if fault in active:
                active.remove(fault)

    def condition(self, src: int, dst: int) -> Condition:
        """Returns the condition of the link from one rank to another."""
        condition = Condition()
        for fault in self._held.get((src, dst), ()):
            condition = condition.after(fault)
        return condition

    def slowdown(self, rank: int) -> float:
        """Returns the factor of a replica's computing time."""
        active = self._held.get(rank)
        factors = [fault.factor for fault in active if fault.factor is not None] if active else []
        return factors[-1] if factors else 1.0

    def hangs(self, rank: int) -> bool:
        """Returns True if a replica is suspended."""
        return any(fault.kind == "hang" for fault in self._held.get(rank, ()))

    def is_hung_for_good(self, rank: int) -> bool:
        """Returns True if a replica is suspended by a fault without an end."""
        return any(fault.kind == "hang" and fault.for_s is None for fault in self._held.get(rank, ()))

    def _concerned(self, fault: Fault) -> Iterator[Struck]:
        if fault.kind in BETWEEN_TWO:
            yield from fault.ways(self._size)
        if fault.kind not in BETWEEN_TWO or (fault.kind == "restore" and fault.peer is None):
            yield fault.rank


class Stage:
    """Environment in which faults happen: replicas, and the links between them.

    Args:
      size: Number of replicas.
    """

    def __init__(self, size: int) -> None:
        self.size, self.standing = size, Standing(size)

    def now(self) -> float:
        """Returns the seconds since the first step began."""
        raise NotImplementedError

    def at(self, t: float, fn: Callable[[], None]) -> None:
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

    def change(self, src: int, dst: int, before: Condition, now: Condition) -> None:
        """Sets the condition of the link from one rank to another."""
        raise NotImplementedError

    def hang(self, rank: int, hangs: bool) -> None:
        """Suspends or resumes a replica."""
        raise NotImplementedError

    def strike(self, fault: Fault) -> None:
        """Injects a fault immediately."""
        replica_actions = {"crash": self.crash, "leave": self.leave, "join": self.join}
        if fault.kind in replica_actions:
            replica_actions[fault.kind](fault.rank)
        elif fault.kind == "reset":
            for link in fault.ways(self.size):
                self.reset(*link)
        else:
            self._change(fault, self.standing.begin)

    def undo(self, fault: Fault) -> None:
        """Reverts a fault whose time is over."""
        self._change(fault, self.standing.end)

    def _change(self, fault: Fault, how: Callable[[Fault], None]) -> None:
        """Applies the effects of a fault's beginning or end to the replica and its links."""
        standing, rank, links = self.standing, fault.rank, list(fault.ways(self.size))
        was_hung, conditions = standing.hangs(rank), [standing.condition(*link) for link in links]
        how(fault)
        for link, previous in zip(links, conditions, strict=True):
            if (condition := standing.condition(*link)) != previous:
                self.change(*link, previous, condition)
        if standing.hangs(rank) != was_hung:
            self.hang(rank, not was_hung)


class FaultInjector:
    """Event sink that injects faults when a replica has done the given number of steps.

    Args:
      plan: Faults to inject.
      environment: Environment of the replicas.
    """

    def __init__(self, plan: FaultPlan, stage: Stage) -> None:
        self._plan, self._stage = plan, stage
        self._struck: set[Fault] = set()
        self._waiting: dict[tuple[int, int], list[Fault]] = {}
        for fault in plan.faults:
            if fault.at_step is not None:
                watched_rank = 0 if fault.kind == "join" else fault.rank
                self._waiting.setdefault((watched_rank, fault.at_step), []).append(fault)
            elif fault.at_s is not None:
                stage.at(fault.at_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def __call__(self, event: Event) -> None:
        """Handles one event of one replica."""
        if event["event"] not in ("begin", "step"):
            return
        steps_done = int(str(event["step"])) + (event["event"] == "step")
        for fault in self._waiting.pop((int(str(event["rank"])), steps_done), ()):
            self._strike(fault)

    @property
    def missed(self) -> tuple[Fault, ...]:
        """Faults that have not been injected, or only after the end of the run."""
        return tuple(fault for fault in self._plan.faults if fault not in self._struck)

    def warn_of_missed(self) -> None:
        """Warns at the end of a run of the faults that were never injected."""
        if not self.missed:
            return
        names = ", ".join(map(str, self.missed[:NAMED]))
        suffix = f" and {len(self.missed) - NAMED} more" if len(self.missed) > NAMED else ""
        logging.getLogger("farflung").warning(
            "%s of %s faults never struck, for the run or their replica had ended: %s%s",
            len(self.missed),
            len(self._plan.faults),
            names,
            suffix,
        )

    def _strike(self, fault: Fault) -> None:
        if not self._stage.is_over():
            self._struck.add(fault)
        self._stage.strike(fault)
        if fault.for_s is not None:
            self._stage.at(self._stage.now() + fault.for_s, lambda: self._stage.undo(fault))
