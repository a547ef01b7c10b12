"""What a step and an exchange take, as one replica measures it."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from farflung.replica.flights import Flight
from farflung.types import Json

__all__ = ["Times"]

RECENT = 16
"""Steps and exchanges that count."""


class Times:
    """Medians over recent steps and exchanges.

    Args:
      now: the world's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._before_s = 0.0
        """What the run has taken on another clock, before this one's zero."""
        self._begin: float | None = None
        self._waited = 0.0
        self.waited_s = 0.0
        """Seconds waited for exchanges so far."""
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._exchanges: deque[float] = deque(maxlen=RECENT)
        self._open: tuple[int, float, float] | None = None

    @property
    def elapsed_s(self) -> float:
        """What the run has taken so far."""
        return self._before_s + self._now()

    def go_on_from(self, elapsed_s: float) -> None:
        """The run is resumed, and has taken so long."""
        self._before_s = elapsed_s - self._now()

    def step_begins(self) -> None:
        """Closes the step before."""
        now = self._now()
        if self._begin is not None:
            self._steps.append(now - self._begin - self._waited)
        self._begin, self._waited = now, 0.0

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What passes inside is no work of the step."""
        begin = self._now()
        yield
        self._waited += self._now() - begin

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The same, and a wait for an exchange."""
        begin = self._now()
        yield
        waited = self._now() - begin
        self._waited += waited
        self.waited_s += waited

    def exchanged(self, flight: Flight) -> None:
        """An exchange has ended; those of one step count from the first's beginning to the last's end."""
        end = self._now() if flight.ended_s is None else flight.ended_s
        step, began, ended = self._open or (flight.step, flight.began_s, end)
        if step != flight.step:
            self._exchanges.append(ended - began)
            began, ended = flight.began_s, end
        self._open = flight.step, min(began, flight.began_s), max(ended, end)

    @staticmethod
    def from_json(told: Any) -> dict[str, Any]:
        """What :meth:`to_json` gave, from whatever was read.

        Raises:
          ValueError: it is something else.
        """
        elapsed, step, exchange = (told[name] for name in ("elapsed_s", "step_s", "exchange_s"))
        for seconds in (elapsed, 0.0 if step is None else step, 0.0 if exchange is None else exchange):
            if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
                raise ValueError(f"{seconds!r} seconds")
        return {"elapsed_s": elapsed, "step_s": step, "exchange_s": exchange}

    def to_json(self) -> Json:
        """The clock and the medians, by the names of :class:`farflung.types.SharedStats`."""
        return {
            "elapsed_s": self.elapsed_s,
            "step_s": statistics.median(self._steps) if self._steps else None,
            "exchange_s": statistics.median(self._exchanges) if self._exchanges else None,
        }
