"""What messages in virtual time need of the clock."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from farflung.tasks import Pending

__all__ = ["Carrier", "Clock", "Moment"]


class Clock(Protocol):
    """Virtual time."""

    def now(self) -> float:
        """Virtual seconds."""
        ...

    def at(self, t: float, fn: Callable[[], None], priority: int = 0) -> None:
        """Runs ``fn`` at time ``t``; lower ``priority`` first among equal times."""
        ...


class Carrier(Protocol):
    """Computes when messages leave and arrive."""

    def send(
        self, src: int, dst: int, bits: int, priority: int, arrived: Callable[[float], None]
    ) -> Pending[None]:
        """Starts a message; done when its last bit has left, ``arrived(t)`` is called when it is there."""
        ...


class Moment(Pending[None]):
    """Done at a time that is known beforehand; costs the clock an event only where somebody waits for it."""

    __slots__ = ("_at", "_clock", "_watched")

    def __init__(self, clock: Clock, at: float) -> None:
        super().__init__()
        self._clock, self._at, self._watched = clock, at, False

    @property
    def done(self) -> bool:
        """Whether the clock has come to it."""
        if not self._done and self._clock.now() >= self._at:
            self.set(None)
        return self._done

    def on_done(self, callback: Callable[[Pending[None]], None]) -> None:
        """Calls ``callback(self)`` at that time; at once where it is past."""
        if not self.done and not self._watched:
            self._watched = True
            self._clock.at(self._at, lambda: self.set(None))
        super().on_done(callback)
