"""Virtual time: one heap of ``(time, priority, sequence)``."""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable
from typing import Protocol

from typing_extensions import override

from farflung.tasks import Pending

__all__ = ["Carrier", "Clock", "ClockInUse", "Departure", "VirtualClock"]


class Clock(Protocol):
    """What messages need of virtual time."""

    def now(self) -> float:
        """Virtual seconds."""
        ...

    def at(self, t: float, fn: Callable[[], None], priority: int = 0) -> None:
        """Runs ``fn`` when the clock shows ``t``; lower ``priority`` first among equal times."""
        ...

    def soon(self, fn: Callable[[], None]) -> None:
        """Runs ``fn`` before the clock moves on."""
        ...


class VirtualClock:
    """A heap of callbacks at virtual times; ties are broken by priority, then by the order of the calls of :meth:`at`.

    Args:
      now: the time it begins with, in virtual seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self._now = now
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

    def run(self, until: float = math.inf) -> None:
        """Runs callbacks until none is left, or none up to ``until``."""
        while True:
            while self._soon:
                self._soon.popleft()()
            if not self._heap or self._heap[0][0] > until:
                return
            self._now, _, _, fn = heapq.heappop(self._heap)
            fn()

    def due(self) -> float:
        """Returns the time of the next callback; infinity where there is none."""
        return self._now if self._soon else self._heap[0][0] if self._heap else math.inf

    def hand_over(self, other: Clock) -> None:
        """Moves the callbacks that are left to another clock, in the same order."""
        while self._soon:
            other.soon(self._soon.popleft())
        while self._heap:
            t, priority, _, fn = heapq.heappop(self._heap)
            other.at(t, fn, priority)


class ClockInUse:
    """Whichever clock is used at present.

    Args:
      used: that clock; may be changed.
    """

    def __init__(self, used: Clock) -> None:
        self.used = used

    def now(self) -> float:
        return self.used.now()

    def at(self, t: float, fn: Callable[[], None], priority: int = 0) -> None:
        self.used.at(t, fn, priority)

    def soon(self, fn: Callable[[], None]) -> None:
        self.used.soon(fn)


class Carrier(Protocol):
    """Computes when messages leave and arrive."""

    def send(
        self, src: int, dst: int, nbytes: int, priority: int, arrived: Callable[[float], None]
    ) -> Pending[None]:
        """Starts a message of so many bytes of payload; done when its last bit has left.

        ``arrived(t)`` is called when it is there.
        """
        ...


class Departure(Pending[None]):
    """Done at a given time; schedules a clock event only once a callback is registered.

    Args:
      clock: virtual time.
      at: the time in virtual seconds.
    """

    __slots__ = ("_at", "_clock", "_watched")

    def __init__(self, clock: Clock, at: float) -> None:
        super().__init__()
        self._clock, self._at, self._watched = clock, at, False

    @property
    @override
    def done(self) -> bool:
        if not self._done and self._clock.now() >= self._at:
            self.set(None)
        return self._done

    @override
    def on_done(self, callback: Callable[[Pending[None]], None]) -> None:
        """Calls ``callback(self)`` at the given time, or at once where it has passed."""
        if not self.done and not self._watched:
            self._watched = True
            self._clock.at(self._at, self._look)
        super().on_done(callback)

    def _look(self) -> None:
        if not self._done:
            self.set(None)
