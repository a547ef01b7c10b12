"""Pauses of links and replicas in virtual time."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

from farflung.sim.clock import VirtualClock

__all__ = ["Pauses"]


class Pauses:
    """Pauses of ranks and links: their events wait until they resume.

    An event keeps its remaining time over a pause. It is due in *running* seconds, for which its key was not paused.

    Args:
      clock: Virtual clock.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._since: dict[Hashable, float] = {}
        self._lost_s: dict[Hashable, float] = {}
        self._held: dict[Hashable, list[tuple[float, Callable[[float], None]]]] = {}
        self._last_due: dict[tuple[int, int], float] = {}

    def stop(self, key: Hashable) -> None:
        """Pauses a rank or a link."""
        self._since.setdefault(key, self._clock.now())

    def go_on(self, key: Hashable) -> None:
        """Resumes a rank or a link, and its pending events."""
        if key in self._since:
            self._lost_s[key] = self.lost_s(key)
            del self._since[key]
            for due_s, fn in self._held.pop(key, []):
                self.wait(key, due_s, fn)

    def stopped(self, key: Hashable) -> bool:
        return key in self._since

    def lost_s(self, key: Hashable) -> float:
        """Returns the seconds of all pauses so far."""
        earlier_s = self._lost_s.get(key, 0.0)
        return earlier_s + self._clock.now() - self._since[key] if key in self._since else earlier_s

    def wait(self, key: Hashable, due: float, fn: Callable[[float], None]) -> None:
        """Calls ``fn(time)`` as soon as ``due_s`` running seconds have passed; at once if they have."""
        if key in self._since:
            self._held.setdefault(key, []).append((due, fn))
            return
        call_s = due + self.lost_s(key)
        if call_s <= self._clock.now():
            fn(self._clock.now())
        else:
            self._clock.at(call_s, partial(self.wait, key, due, fn))

    def on_the_way(self, src: int, dst: int, arrived: Callable[[float], None]) -> Callable[[float], None]:
        """Returns the function to call at the arrival of a message sent now, in place of ``on_arrival``.

        A message needs as much time without a cut as it would have taken, and never overtakes an earlier one. Shared
        capacity that it takes meanwhile is not given back.
        """
        key = (src, dst)
        paused_s = self.lost_s(key)

        def handle_arrival(t: float) -> None:
            due_s = max(t - paused_s, self._last_due.get((src, dst), 0.0))
            self._last_due[src, dst] = due_s
            self.wait(key, due_s, arrived)

        return handle_arrival
