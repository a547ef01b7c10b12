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
        self._paused_since_s: dict[Hashable, float] = {}
        self._paused_s: dict[Hashable, float] = {}
        self._pending_calls: dict[Hashable, list[tuple[float, Callable[[float], None]]]] = {}
        self._last_arrival_s: dict[tuple[int, int], float] = {}

    def pause(self, key: Hashable) -> None:
        """Pauses a rank or a link."""
        self._paused_since_s.setdefault(key, self._clock.time())

    def resume(self, key: Hashable) -> None:
        """Resumes a rank or a link; each pending event keeps its remaining time."""
        if key in self._paused_since_s:
            self._paused_s[key] = self.get_paused_s(key)
            del self._paused_since_s[key]
            for due_s, fn in self._pending_calls.pop(key, []):
                self.call_at(key, due_s, fn)

    def is_paused(self, key: Hashable) -> bool:
        return key in self._paused_since_s

    def get_paused_s(self, key: Hashable) -> float:
        """Returns the seconds of all pauses so far."""
        earlier_s = self._paused_s.get(key, 0.0)
        return (
            earlier_s + self._clock.time() - self._paused_since_s[key]
            if key in self._paused_since_s
            else earlier_s
        )

    def call_at(self, key: Hashable, due_s: float, fn: Callable[[float], None]) -> None:
        """Calls ``fn(time)`` as soon as ``due_s`` running seconds have passed; immediately if they have."""
        if key in self._paused_since_s:
            self._pending_calls.setdefault(key, []).append((due_s, fn))
            return
        call_s = due_s + self.get_paused_s(key)
        if call_s <= self._clock.time():
            fn(self._clock.time())
        else:
            self._clock.call_at(call_s, partial(self.call_at, key, due_s, fn))

    def wrap_arrival(
        self, src: int, dst: int, on_arrival: Callable[[float], None]
    ) -> Callable[[float], None]:
        """Returns a replacement for a message's ``on_arrival``, which adds the link's later pauses.

        A message needs as much time without a cut as it would have taken, and never overtakes an earlier one. Shared
        capacity that it takes meanwhile is not given back.
        """
        key = (src, dst)
        paused_s = self.get_paused_s(key)

        def handle_arrival(t: float) -> None:
            due_s = max(t - paused_s, self._last_arrival_s.get((src, dst), 0.0))
            self._last_arrival_s[src, dst] = due_s
            self.call_at(key, due_s, on_arrival)

        return handle_arrival
