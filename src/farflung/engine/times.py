"""Times of steps and exchanges, as one rank measures them."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from farflung.engine.flight import Flight
from farflung.types import Json

__all__ = ["Times"]

RECENT = 16
"""Steps and exchanges that a median is over."""


class Times:
    """Medians over recent steps and exchanges, and waits so far.

    Args:
      now: the world's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._before_s = 0.0
        """Seconds that the run had taken before this clock's zero."""
        self._begin: float | None = None
        self._waited = 0.0
        self.waited_s = 0.0
        """Seconds waited for exchanges so far."""
        self.arrived_s = 0.0
        """Time at which the last of the awaited results had arrived."""
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._exchanges: deque[float] = deque(maxlen=RECENT)
        self._open: tuple[int, float, float] | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds that the run has taken so far."""
        return self._before_s + self._now()

    def resume_from(self, elapsed_s: float) -> None:
        """Counts on from the seconds that a resumed run had taken."""
        self._before_s = elapsed_s - self._now()

    def begin_step(self) -> None:
        """Notes the beginning of a step."""
        now = self._now()
        if self._begin is not None:
            self._steps.append(now - self._begin - self._waited)
        self._begin, self._waited = now, 0.0

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Leaves the time inside out of the step's."""
        begin = self._now()
        yield
        self._waited += self._now() - begin

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Counts the time inside as a wait for an exchange."""
        begin = self._now()
        yield
        waited = self._now() - begin
        self._waited += waited
        self.waited_s += waited

    def record_exchange(self, exchange: Flight) -> None:
        """Adds an exchange that has ended; those of one step count from the first's beginning to the last's end."""
        end = self._now() if exchange.ended_s is None else exchange.ended_s
        self.arrived_s = max(self.arrived_s, end)
        step, began, ended = self._open or (exchange.step, exchange.began_s, end)
        if step != exchange.step:
            self._exchanges.append(ended - began)
            began, ended = exchange.began_s, end
        self._open = exchange.step, min(began, exchange.began_s), max(ended, end)

    @staticmethod
    def from_json(measured: Any) -> dict[str, Any]:
        """Checks what :meth:`to_json` returned, after it was read from a message or file.

        Raises:
          ValueError: it is something else.
        """
        elapsed, step, exchange = (measured[name] for name in ("elapsed_s", "step_s", "exchange_s"))
        for seconds in (elapsed, 0.0 if step is None else step, 0.0 if exchange is None else exchange):
            if type(seconds) not in (int, float) or not 0 <= seconds < math.inf:
                raise ValueError(f"{seconds!r} seconds")
        return {"elapsed_s": elapsed, "step_s": step, "exchange_s": exchange}

    def to_json(self) -> Json:
        """Returns the clock and the medians, by the names of :class:`farflung.types.SharedStats`."""
        return {
            "elapsed_s": self.elapsed_s,
            "step_s": statistics.median(self._steps) if self._steps else None,
            "exchange_s": statistics.median(self._exchanges) if self._exchanges else None,
        }
