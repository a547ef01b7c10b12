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
        self._time_s = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._ready_callbacks: deque[Callable[[], None]] = deque()
        self._sequence = 0

    def time(self) -> float:
        """Returns the virtual seconds since the beginning."""
        return self._time_s

    def call_at(self, t: float, fn: Callable[[], None], priority: int = 0) -> None:
        """Calls ``fn`` at time ``t``, or now if ``t`` is past; of equal times, the lowest ``priority`` first."""
        self._sequence += 1
        heapq.heappush(self._heap, (max(t, self._time_s), priority, self._sequence, fn))

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Calls ``fn`` before the clock moves on."""
        self._ready_callbacks.append(fn)

    def run(self) -> None:
        """Runs callbacks until none remains."""
        while True:
            while self._ready_callbacks:
                self._ready_callbacks.popleft()()
            if not self._heap:
                return
            self._time_s, _, _, fn = heapq.heappop(self._heap)
            fn()

    def get_next_time(self) -> float:
        """Returns the time of the next callback; infinity without one."""
        return self._time_s if self._ready_callbacks else self._heap[0][0] if self._heap else math.inf
