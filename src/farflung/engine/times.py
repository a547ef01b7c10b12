"""Timer of steps and exchanges of one rank."""

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
"""Number of steps and exchanges in a median."""


class Times:
    """Medians over recent steps and exchanges, and total waits.

    Args:
      read_clock: Function that returns the run's time in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._before_s = 0.0
        """Seconds of the run before this clock's zero."""
        self._begin: float | None = None
        self._waited = 0.0
        self.waited_s = 0.0
        """Seconds waited for exchanges so far."""
        self.arrived_s = 0.0
        """Time of the latest awaited result."""
        self._steps: deque[float] = deque(maxlen=RECENT)
        self._exchanges: deque[float] = deque(maxlen=RECENT)
        self._open: tuple[int, float, float] | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds of the run so far."""
        return self._before_s + self._now()

    def resume_from(self, elapsed_s: float) -> None:
        """Continues from the seconds of a resumed run."""
        self._before_s = elapsed_s - self._now()

    def begin_step(self) -> None:
        """Records the beginning of a step."""
        now_s = self._now()
        if self._begin is not None:
            self._steps.append(now_s - self._begin - self._waited)
        self._begin, self._waited = now_s, 0.0

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Excludes the time inside from the step's."""
        begin_s = self._now()
        yield
        self._waited += self._now() - begin_s

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Measures the time inside as a wait for an exchange."""
        begin_s = self._now()
        yield
        wait_s = self._now() - begin_s
        self._waited += wait_s
        self.waited_s += wait_s

    def record_exchange(self, exchange: Flight) -> None:
        """Records a completed exchange; those of one step count from the first start to the last end."""
        end = self._now() if exchange.ended_s is None else exchange.ended_s
        self.arrived_s = max(self.arrived_s, end)
        step, start_s, end_s = self._open or (exchange.step, exchange.began_s, end)
        if step != exchange.step:
            self._exchanges.append(end_s - start_s)
            start_s, end_s = exchange.began_s, end
        self._open = exchange.step, min(start_s, exchange.began_s), max(end_s, end)

    @staticmethod
    def from_json(measured: Any) -> dict[str, Any]:
        """Validates a result of :meth:`to_json` that was read from a message or file.

        Raises:
          ValueError: the value is invalid.
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
