"""Time split of a run, and its summary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field

from farflung.types import Json, State

__all__ = ["Leg", "Summary", "TimeSplit"]


@dataclass(slots=True)
class TimeSplit:
    """Time of a replica by activity, in seconds."""

    compute: float = 0.0
    exposed_communication: float = 0.0
    data_wait: float = 0.0
    evaluation: float = 0.0
    """Time of evaluations and checkpoints; 0 in virtual time, unless they are counted there."""
    other: float = 0.0
    scoring: float = 0.0
    """Time of scoring samples while exchanges were in flight."""

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
        return TimeSplit(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True, slots=True)
class Leg:
    """Part of a run between its beginning or a resume and its end or a checkpoint, or several in a row.

    Args:
      from_step: Number of steps completed before it.
      duration_s: Seconds on the run's clock.
      time_s: Duration by activity.
    """

    from_step: int
    duration_s: float
    time_s: TimeSplit

    def add_earlier(self, earlier: Leg) -> Leg:
        return Leg(earlier.from_step, earlier.duration_s + self.duration_s, earlier.time_s + self.time_s)

    def to_json(self) -> dict[str, Json]:
        return {
            "from_step": self.from_step,
            "duration_s": self.duration_s,
            "time_s": self.time_s.to_json(),
        }

    @staticmethod
    def from_state(state: State) -> Leg:
        """Restores a leg from the :meth:`to_json` of a checkpoint."""
        return Leg(state["from_step"], state["duration_s"], TimeSplit(**state["time_s"]))


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a whole run, over all legs of a resumed one.

    Steps after the checkpoint that a run resumed from are done again, and count once.
    """

    steps: int
    samples: int
    final_accuracy: float | None
    """Last measured accuracy; ``None`` if the run stopped before any evaluation."""
    final_loss: float | None
    bytes_sent: int
    duration_s: float
    time_s: TimeSplit
    is_stopped: bool
    sent: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Bytes sent to each rank, by kind; see :class:`farflung.comm.Purpose`."""
    schedule_nbytes: int = 0
    """Peak memory of the schedule, beyond model, gradient and optimizer."""
    reducer: Mapping[str, Json] = field(default_factory=dict)
    """Figures of the reducer; see :meth:`farflung.types.Reducer.report`."""
    sampling: Mapping[str, Json] = field(default_factory=dict)
    """Predicted gain of importance sampling; see :meth:`farflung.sampling.Gain.report`."""
    last_leg: Leg | None = None
    """Leg since the run was resumed; ``None`` for a run in one piece."""

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
            "stopped": self.is_stopped,
            **({"reducer": dict(self.reducer)} if self.reducer else {}),
            **({"sampling": dict(self.sampling)} if self.sampling else {}),
            **({} if self.last_leg is None else {"last_leg": self.last_leg.to_json()}),
        }
