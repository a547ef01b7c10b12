"""Virtual time: one heap of ``(time, priority, sequence)``."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

__all__ = ["VirtualClock"]


class VirtualClock:
    """A heap of callbacks at virtual times; ties are broken by priority, then by the order of calls of :meth:`at`."""

    def __init__(self) -> None:
        self._now = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._soon: deque[Callable[[], None]] = deque()
        self._sequence = 0

    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._now

    def at(self, t: float, fn: Callable[[], None], priority: int = 0) -> None:
        """Runs ``fn`` when the clock shows ``t``; lower ``priority`` first among equal times."""
        self._sequence += 1
        heapq.heappush(self._heap, (max(t, self._now), priority, self._sequence, fn))

    def soon(self, fn: Callable[[], None]) -> None:
        """Runs ``fn`` before the clock moves on."""
        self._soon.append(fn)

    def run(self) -> None:
        """Runs callbacks until none is left."""
        while True:
            while self._soon:
                self._soon.popleft()()
            if not self._heap:
                return
            self._now, _, _, fn = heapq.heappop(self._heap)
            fn()

    def due(self) -> float:
        """Returns the time of the next callback; infinity where there is none."""
        return self._now if self._soon else self._heap[0][0] if self._heap else math.inf
