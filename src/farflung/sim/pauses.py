"""Links that carry nothing for a while, and replicas that stand still."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial

from farflung.sim.clock import VirtualClock

__all__ = ["Pauses"]


class Pauses:
    """Holds up what happens to a rank, or on the way from one rank to another, while it is stopped.

    What was half-way when it was stopped is half-way when it goes on: events are due in *running* seconds, those for
    which their key was not stopped.

    Args:
      clock: virtual time.
    """

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._since: dict[Hashable, float] = {}
        self._lost_s: dict[Hashable, float] = {}
        self._held: dict[Hashable, list[tuple[float, Callable[[float], None]]]] = {}
        self._last_due: dict[tuple[int, int], float] = {}

    def stop(self, key: Hashable) -> None:
        """From now on nothing happens to it."""
        self._since.setdefault(key, self._clock.now())

    def go_on(self, key: Hashable) -> None:
        """What was held up goes on."""
        if key in self._since:
            self._lost_s[key] = self.lost_s(key)
            del self._since[key]
            for due, fn in self._held.pop(key, []):
                self.wait(key, due, fn)

    def stopped(self, key: Hashable) -> bool:
        return key in self._since

    def lost_s(self, key: Hashable) -> float:
        """Seconds for which it has been stopped so far."""
        before = self._lost_s.get(key, 0.0)
        return before + self._clock.now() - self._since[key] if key in self._since else before

    def wait(self, key: Hashable, due: float, fn: Callable[[float], None]) -> None:
        """Calls ``fn(time)`` as soon as ``due`` running seconds have passed; at once if they have."""
        if key in self._since:
            self._held.setdefault(key, []).append((due, fn))
            return
        at = due + self.lost_s(key)
        if at <= self._clock.now():
            fn(self._clock.now())
        else:
            self._clock.at(at, partial(self.wait, key, due, fn))

    def on_the_way(self, src: int, dst: int, arrived: Callable[[float], None]) -> Callable[[float], None]:
        """What to call when a message sent now would arrive, in the place of ``arrived``.

        A message needs as much time without a cut as it would have taken, and never overtakes one sent before. What it
        takes meanwhile from capacities that others share is not given back.
        """
        key = (src, dst)
        lost_then = self.lost_s(key)

        def came(t: float) -> None:
            due = max(t - lost_then, self._last_due.get((src, dst), 0.0))
            self._last_due[src, dst] = due
            self.wait(key, due, arrived)

        return came
