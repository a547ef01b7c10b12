"""Where time goes: in steps and exchanges as one replica measures them, and in a whole run."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field
from typing import Any

from farflung.replica.in_flight import InFlight
from farflung.types import Json, State

__all__ = ["Leg", "Summary", "TimeSplit", "Times"]


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

    def exchanged(self, exchange: InFlight) -> None:
        """An exchange has ended; those of one step count from the first's beginning to the last's end."""
        end = self._now() if exchange.ended_s is None else exchange.ended_s
        step, began, ended = self._open or (exchange.step, exchange.began_s, end)
        if step != exchange.step:
            self._exchanges.append(ended - began)
            began, ended = exchange.began_s, end
        self._open = exchange.step, min(began, exchange.began_s), max(ended, end)

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


@dataclass(slots=True)
class TimeSplit:
    """Where a replica's time went, in seconds."""

    compute: float = 0.0
    exposed_communication: float = 0.0
    data_wait: float = 0.0
    evaluation: float = 0.0
    """Evaluations and checkpoints; 0 in virtual time, unless they are counted there."""
    other: float = 0.0
    scoring: float = 0.0
    """Of samples, while exchanges were under way."""

    def to_json(self) -> dict[str, Json]:
        return {
            "compute": self.compute,
            "exposed_communication": self.exposed_communication,
            "data_wait": self.data_wait,
            "evaluation": self.evaluation,
            **({"scoring": self.scoring} if self.scoring else {}),
            "other": self.other,
        }

    def __add__(self, other: TimeSplit) -> TimeSplit:
        return TimeSplit(*(one + more for one, more in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of a run between its beginning or a resume and its end or a checkpoint, or several of them in a row.

    Args:
      from_step: the steps that had been done when it began.
      duration_s: seconds on the run's clock.
      time_s: where they went.
    """

    from_step: int
    duration_s: float
    time_s: TimeSplit

    def after(self, earlier: Leg) -> Leg:
        return Leg(earlier.from_step, earlier.duration_s + self.duration_s, earlier.time_s + self.time_s)

    def to_json(self) -> dict[str, Json]:
        return {
            "from_step": self.from_step,
            "duration_s": self.duration_s,
            "time_s": self.time_s.to_json(),
        }

    @staticmethod
    def from_state(state: State) -> Leg:
        """From what :meth:`to_json` gave a checkpoint."""
        return Leg(state["from_step"], state["duration_s"], TimeSplit(**state["time_s"]))


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended: all figures are of the whole run, over every leg of one that was resumed.

    What was done after the checkpoint that a run goes on from is done again, and counts once.
    """

    steps: int
    samples: int
    final_accuracy: float | None
    """The last one measured; ``None`` where the run was stopped before any."""
    final_loss: float | None
    bytes_sent: int
    duration_s: float
    time_s: TimeSplit
    stopped: bool
    sent: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Bytes to each rank, by kind; see :class:`farflung.comm.Purpose`."""
    schedule_nbytes: int = 0
    """The most memory that the schedule took up beside model, gradient and optimizer."""
    reducer: Mapping[str, Json] = field(default_factory=dict)
    """Figures of the reducer's own; see :meth:`farflung.types.Reducer.report`."""
    sampling: Mapping[str, Json] = field(default_factory=dict)
    """What drawing by scores was worth; see :meth:`farflung.sampling.Gain.report`."""
    last_leg: Leg | None = None
    """What was done since the run was resumed; ``None`` for a run in one piece."""

    def to_json(self) -> dict[str, Json]:
        return {
            "final_accuracy": self.final_accuracy,
            "final_loss": self.final_loss,
            "steps": self.steps,
            "samples": self.samples,
            "bytes_sent_per_replica": self.bytes_sent,
            "bytes_sent_to": {kind: list(to) for kind, to in self.sent.items()},
            "schedule_bytes_per_replica": self.schedule_nbytes,
            "duration_s": self.duration_s,
            "time_s": self.time_s.to_json(),
            "stopped": self.stopped,
            **({"reducer": dict(self.reducer)} if self.reducer else {}),
            **({"sampling": dict(self.sampling)} if self.sampling else {}),
            **({} if self.last_leg is None else {"last_leg": self.last_leg.to_json()}),
        }
