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

__all__ = ["StepTimer"]

MEDIAN_WINDOW = 16
"""Number of steps and exchanges in a median."""


class StepTimer:
    """Medians over recent steps and exchanges, and total waits.

    Args:
      read_clock: Function that returns the run's time in seconds.
    """

    def __init__(self, read_clock: Callable[[], float]) -> None:
        self._read_clock = read_clock
        self._resumed_s = 0.0
        """Seconds of the run before this clock's zero."""
        self._step_start_s: float | None = None
        self._step_wait_s = 0.0
        self.waited_s = 0.0
        """Seconds waited for exchanges so far."""
        self.last_arrival_s = 0.0
        """Time of the latest awaited result."""
        self._step_times_s: deque[float] = deque(maxlen=MEDIAN_WINDOW)
        self._exchange_times_s: deque[float] = deque(maxlen=MEDIAN_WINDOW)
        self._current_exchange: tuple[int, float, float] | None = None

    @property
    def elapsed_s(self) -> float:
        """Seconds of the run so far."""
        return self._resumed_s + self._read_clock()

    def resume_from(self, elapsed_s: float) -> None:
        """Continues from the seconds of a resumed run."""
        self._resumed_s = elapsed_s - self._read_clock()

    def begin_step(self) -> None:
        """Records the beginning of a step."""
        now_s = self._read_clock()
        if self._step_start_s is not None:
            self._step_times_s.append(now_s - self._step_start_s - self._step_wait_s)
        self._step_start_s, self._step_wait_s = now_s, 0.0

    @contextmanager
    def exclude(self) -> Iterator[None]:
        """Excludes the time inside from the step's."""
        begin_s = self._read_clock()
        yield
        self._step_wait_s += self._read_clock() - begin_s

    @contextmanager
    def measure_wait(self) -> Iterator[None]:
        """Measures the time inside as a wait for an exchange."""
        begin_s = self._read_clock()
        yield
        wait_s = self._read_clock() - begin_s
        self._step_wait_s += wait_s
        self.waited_s += wait_s

    def record_exchange(self, exchange: Flight) -> None:
        """Records a completed exchange; those of one step count from the first start to the last end."""
        end = self._read_clock() if exchange.end_s is None else exchange.end_s
        self.last_arrival_s = max(self.last_arrival_s, end)
        step, start_s, end_s = self._current_exchange or (exchange.step, exchange.start_s, end)
        if step != exchange.step:
            self._exchange_times_s.append(end_s - start_s)
            start_s, end_s = exchange.start_s, end
        self._current_exchange = exchange.step, min(start_s, exchange.start_s), max(end_s, end)

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
            "step_s": statistics.median(self._step_times_s) if self._step_times_s else None,
            "exchange_s": statistics.median(self._exchange_times_s) if self._exchange_times_s else None,
        }
