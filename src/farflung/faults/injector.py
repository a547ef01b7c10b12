"""Makes a plan of faults come true, and says what the faults that hold make of ways and replicas."""

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
"""Faults that a warning names; it counts the others."""


@dataclass(frozen=True, slots=True)
class Condition:
    """What has happened to a way; by default nothing.

    Args:
      cut: nothing arrives, without notice.
      loss: share of packets that are lost, besides the network's own.
      bandwidth_bps: there is no more, in bits per second; on top of the network's own limits.
    """

    cut: bool = False
    loss: float = 0.0
    bandwidth_bps: float = math.inf

    def after(self, fault: Fault) -> Condition:
        """What one more fault of ``cut``, ``throttle`` or ``lose`` makes of it."""
        if fault.kind == "cut":
            return replace(self, cut=True)
        if fault.bandwidth_bps is not None:
            return replace(self, bandwidth_bps=fault.bandwidth_bps)
        assert fault.loss is not None
        return replace(self, loss=fault.loss)


Struck: TypeAlias = "tuple[int, int] | int"
"""A way, from one rank to another, or a replica."""


class Standing:
    """What has begun and is not undone; of one kind the last counts, and what is undone uncovers the one before.

    Args:
      size: how many replicas.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._held: dict[Struck, list[Fault]] = {}

    def begin(self, fault: Fault) -> None:
        """A fault of :data:`farflung.faults.PASSING` or a ``restore`` has happened."""
        for target in self._concerned(fault):
            active = self._held.setdefault(target, [])
            if fault.kind == "restore":
                active.clear()
            else:
                active.append(fault)

    def end(self, fault: Fault) -> None:
        """Its time is over; nothing where it was restored before."""
        for target in self._concerned(fault):
            active = self._held.get(target, [])
            if fault in active:
                active.remove(fault)

    def condition(self, src: int, dst: int) -> Condition:
        """Of the way from one rank to another."""
        condition = Condition()
        for fault in self._held.get((src, dst), ()):
            condition = condition.after(fault)
        return condition

    def slowdown(self, rank: int) -> float:
        """How many times as long a replica computes."""
        active = self._held.get(rank)
        factors = [fault.factor for fault in active if fault.factor is not None] if active else []
        return factors[-1] if factors else 1.0

    def hangs(self, rank: int) -> bool:
        """Whether a replica stands still."""
        return any(fault.kind == "hang" for fault in self._held.get(rank, ()))

    def is_hung_for_good(self, rank: int) -> bool:
        """Returns True while a fault without an end of its own has a replica stand still."""
        return any(fault.kind == "hang" and fault.for_s is None for fault in self._held.get(rank, ()))

    def _concerned(self, fault: Fault) -> Iterator[Struck]:
        if fault.kind in BETWEEN_TWO:
            yield from fault.ways(self._size)
        if fault.kind not in BETWEEN_TWO or (fault.kind == "restore" and fault.peer is None):
            yield fault.rank


class Stage:
    """A world in which things go wrong: its replicas, and the ways between them.

    Args:
      size: how many replicas.
    """

    def __init__(self, size: int) -> None:
        self.size, self.standing = size, Standing(size)

    def now(self) -> float:
        """Seconds since the first step began."""
        raise NotImplementedError

    def at(self, t: float, fn: Callable[[], None]) -> None:
        """Calls ``fn`` when ``t`` seconds have passed since then."""
        raise NotImplementedError

    def is_over(self) -> bool:
        """Returns True once every replica that was left has come to its end."""
        raise NotImplementedError

    def crash(self, rank: int) -> None:
        """Ends a replica at once."""
        raise NotImplementedError

    def leave(self, rank: int) -> None:
        """Has a replica announce its leave and end."""
        raise NotImplementedError

    def join(self, rank: int) -> None:
        """Admits a replica; does nothing if it is present."""
        raise NotImplementedError

    def reset(self, rank: int, peer: int) -> None:
        """Closes the connections of a replica to a peer, at its end."""
        raise NotImplementedError

    def change(self, src: int, dst: int, before: Condition, now: Condition) -> None:
        """Changes the way from one rank to another."""
        raise NotImplementedError

    def hang(self, rank: int, hangs: bool) -> None:
        """Has a replica stand still, or go on."""
        raise NotImplementedError

    def strike(self, fault: Fault) -> None:
        """Makes a fault happen, now."""
        replica_actions = {"crash": self.crash, "leave": self.leave, "join": self.join}
        if fault.kind in replica_actions:
            replica_actions[fault.kind](fault.rank)
        elif fault.kind == "reset":
            for link in fault.ways(self.size):
                self.reset(*link)
        else:
            self._change(fault, self.standing.begin)

    def undo(self, fault: Fault) -> None:
        """Ends a fault whose time is over."""
        self._change(fault, self.standing.end)

    def _change(self, fault: Fault, how: Callable[[Fault], None]) -> None:
        """Has replica and ways feel what a fault's beginning or end changes."""
        standing, rank, links = self.standing, fault.rank, list(fault.ways(self.size))
        was_hung, conditions = standing.hangs(rank), [standing.condition(*link) for link in links]
        how(fault)
        for link, before in zip(links, conditions, strict=True):
            if (after := standing.condition(*link)) != before:
                self.change(*link, before, after)
        if standing.hangs(rank) != was_hung:
            self.hang(rank, not was_hung)


class FaultInjector:
    """A sink for the events of all replicas, which strikes when a replica has done its steps.

    Args:
      plan: what goes wrong.
      stage: where.
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
        """Takes in one event of one replica."""
        if event["event"] not in ("begin", "step"):
            return
        steps_done = int(str(event["step"])) + (event["event"] == "step")
        for fault in self._waiting.pop((int(str(event["rank"])), steps_done), ()):
            self._strike(fault)

    @property
    def missed(self) -> tuple[Fault, ...]:
        """The faults that have not struck, or only after the end."""
        return tuple(fault for fault in self._plan.faults if fault not in self._struck)

    def warn_of_missed(self) -> None:
        """Warns in one line, at the end of a run, of the faults that it did not live to see."""
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
