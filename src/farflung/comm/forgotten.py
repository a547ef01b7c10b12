"""Which exchanges nobody wants to hear of any more."""

from __future__ import annotations

from bisect import bisect_right

__all__ = ["Forgotten"]


class Forgotten:
    """A set of numbers that only grows, kept as runs of consecutive ones.

    Exchanges of one purpose are numbered by step. Whoever forgets each once it is through, whatever has come of it,
    keeps one run for each purpose, however long it goes on.

    >>> forgotten = Forgotten()
    >>> for number in (7, 3, 5, 4, 5):
    ...     forgotten.add(number)
    >>> [number for number in range(10) if number in forgotten], len(forgotten)
    ([3, 4, 5, 7], 2)
    """

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        """Behind the last number of each run."""

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self._begins)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._begins, number) - 1
        return at >= 0 and number < self._ends[at]

    def add(self, number: int) -> None:
        if number in self:
            return
        at = bisect_right(self._begins, number)
        extends = at > 0 and self._ends[at - 1] == number
        meets = at < len(self._begins) and self._begins[at] == number + 1
        if extends and meets:
            self._ends[at - 1] = self._ends.pop(at)
            del self._begins[at]
        elif extends:
            self._ends[at - 1] += 1
        elif meets:
            self._begins[at] = number
        else:
            self._begins.insert(at, number)
            self._ends.insert(at, number + 1)
