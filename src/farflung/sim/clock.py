"""Virtual clock: one heap of ``(time, priority, sequence)``."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable

__all__ = ["VirtualClock"]


class VirtualClock:
    """Heap of callbacks at virtual times; ties are broken by priority, then in order of :meth:`call_at` calls."""

    def __init__(self) -> None:
        self._now = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._soon: deque[Callable[[], None]] = deque()
        self._sequence = 0

    def now(self) -> float:
        """Returns the virtual seconds since the beginning."""
        return self._now

    def at(self, t: float, fn: Callable[[], None], priority: int = 0) -> None:
        """Calls ``fn`` when the clock shows ``t``; of equal times, the lowest ``priority`` first."""
        self._sequence += 1
        heapq.heappush(self._heap, (max(t, self._now), priority, self._sequence, fn))

    def soon(self, fn: Callable[[], None]) -> None:
        """Calls ``fn`` before the clock moves on."""
        self._soon.append(fn)

    def run(self) -> None:
        """Runs callbacks until none remains."""
        while True:
            while self._soon:
                self._soon.popleft()()
            if not self._heap:
                return
            self._now, _, _, fn = heapq.heappop(self._heap)
            fn()

    def due(self) -> float:
        """Returns the time of the next callback; infinity without one."""
        return self._now if self._soon else self._heap[0][0] if self._heap else math.inf
