"""Growth rate of a message source, on the clock of the replica that reads it."""

from __future__ import annotations

from collections import deque

__all__ = ["Growth"]

MIN_MESSAGES = 8
"""Minimum number of messages in a measurement."""
MAX_SPAN_S = 60.0
"""Maximum duration of a measurement that waits for this number."""


class Growth:
    """Message rate of one partition over the last seconds, or over a longer time if few messages arrive.

    Clocks of producers play no part: those of several producers may differ, and messages need no timestamp.

    Args:
      span_s: Minimum duration of a measurement in seconds.
      rate: Messages per second from an earlier measurement, if any.
    """

    def __init__(self, span_s: float, rate: float | None = None) -> None:
        self.rate = rate
        """Messages per second, above 0; ``None`` until measured. It keeps falling while no messages arrive."""
        self._span_s = span_s
        self._marks: deque[tuple[float, int]] = deque()
        """Times of observations and message counts at these times, newest last."""
        self._last_growth_s = 0.0
        """Time of the last new message, or of the first observation."""

    def record_count(self, time_s: float, count: int) -> None:
        """Records the total number of messages at a time."""
        if not self._marks or count > self._marks[-1][1]:
            self._last_growth_s = time_s
        self._marks.append((time_s, count))
        while len(self._marks) > 2 and self._is_long_enough(*self._marks[1]):
            self._marks.popleft()
        start_s, base = self._marks[0]
        if time_s - start_s >= self._span_s:
            self.rate = (
                (count - base) / (time_s - start_s) if count > base else 1 / (time_s - self._last_growth_s)
            )

    def finalize(self) -> None:
        """Computes a rate from the observations so far if there is none yet, however short they are."""
        if self.rate is None and self._marks:
            (start_s, base), (time_s, count) = self._marks[0], self._marks[-1]
            self.rate = max(1, count - base) / (time_s - start_s or self._span_s)

    def _is_long_enough(self, start_s: float, base_count: int) -> bool:
        time_s, count = self._marks[-1]
        return time_s - start_s >= self._span_s and (
            count - base_count >= MIN_MESSAGES or time_s - start_s >= MAX_SPAN_S
        )
