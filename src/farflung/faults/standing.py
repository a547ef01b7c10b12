"""The faults that hold at present, and what they make of ways and replicas together."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from farflung.faults.condition import Condition
from farflung.faults.plan import BETWEEN_TWO, Fault

__all__ = ["Standing"]

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
        for struck in self._concerned(fault):
            held = self._held.setdefault(struck, [])
            if fault.kind == "restore":
                held.clear()
            else:
                held.append(fault)

    def end(self, fault: Fault) -> None:
        """Its time is over; nothing where it was restored before."""
        for struck in self._concerned(fault):
            held = self._held.get(struck, [])
            if fault in held:
                held.remove(fault)

    def condition(self, src: int, dst: int) -> Condition:
        """Of the way from one rank to another."""
        condition = Condition()
        for fault in self._held.get((src, dst), ()):
            condition = condition.after(fault)
        return condition

    def slowdown(self, rank: int) -> float:
        """How many times as long a replica computes."""
        held = self._held.get(rank)
        factors = [fault.factor for fault in held if fault.factor is not None] if held else []
        return factors[-1] if factors else 1.0

    def hangs(self, rank: int) -> bool:
        """Whether a replica stands still."""
        return any(fault.kind == "hang" for fault in self._held.get(rank, ()))

    def _concerned(self, fault: Fault) -> Iterator[Struck]:
        if fault.kind in BETWEEN_TWO:
            yield from fault.ways(self._size)
        if fault.kind not in BETWEEN_TWO or (fault.kind == "restore" and fault.peer is None):
            yield fault.rank
