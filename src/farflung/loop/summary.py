"""Where the time of a run goes, and how a run ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

from farflung.types import Json, State

__all__ = ["Leg", "Summary", "TimeSplit"]


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
