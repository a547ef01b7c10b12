"""How fast a source of messages grows, by the clock of the replica that reads it."""

from __future__ import annotations

from collections import deque

__all__ = ["Growth"]

ENOUGH = 8
"""Messages that a measurement goes back for."""
LONGEST_S = 60.0
"""A measurement does not go back further for them."""


class Growth:
    """The rate of one partition, over the last seconds, and over more of them where few messages come.

    Clocks of producers have no part in it: those of several may differ, and messages need no time.

    Args:
      span_s: seconds that a measurement lasts at least.
      rate: messages per second as measured before, if they were.
    """

    def __init__(self, span_s: float, rate: float | None = None) -> None:
        self.rate = rate
        """Messages per second; ``None`` until it has been measured. Above 0: what is silent gets ever slower."""
        self._span_s = span_s
        self._marks: deque[tuple[float, int]] = deque()
        """When it was looked at and how many messages there had been, the newest last."""
        self._grew_s = 0.0
        """When messages came last, or when it was looked at first."""

    def note(self, now: float, count: int) -> None:
        """Takes in how many messages there had been at a time."""
        if not self._marks or count > self._marks[-1][1]:
            self._grew_s = now
        self._marks.append((now, count))
        while len(self._marks) > 2 and self._is_long_enough(*self._marks[1]):
            self._marks.popleft()
        since, before = self._marks[0]
        if now - since >= self._span_s:
            self.rate = (count - before) / (now - since) if count > before else 1 / (now - self._grew_s)

    def settle(self) -> None:
        """Takes what has been seen for a measurement where there is none yet, however short it was."""
        if self.rate is None and self._marks:
            (since, before), (now, count) = self._marks[0], self._marks[-1]
            self.rate = max(1, count - before) / (now - since or self._span_s)

    def _is_long_enough(self, since: float, before: int) -> bool:
        now, count = self._marks[-1]
        return now - since >= self._span_s and (count - before >= ENOUGH or now - since >= LONGEST_S)
