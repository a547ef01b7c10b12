"""How a run ended, and where its time went."""

from __future__ import annotations

from dataclasses import dataclass

from farflung.types import Json

__all__ = ["Summary", "TimeSplit"]


@dataclass(slots=True)
class TimeSplit:
    """Where a replica's time went, in seconds."""

    compute: float = 0.0
    exposed_communication: float = 0.0
    data_wait: float = 0.0
    evaluation: float = 0.0
    """Evaluations and checkpoints; 0 in virtual time, unless they are counted there."""
    other: float = 0.0

    @property
    def total(self) -> float:
        """All of them."""
        return self.compute + self.exposed_communication + self.data_wait + self.evaluation + self.other

    def to_json(self) -> dict[str, Json]:
        """For telemetry."""
        return {
            "compute": self.compute,
            "exposed_communication": self.exposed_communication,
            "data_wait": self.data_wait,
            "evaluation": self.evaluation,
            "other": self.other,
        }


@dataclass(frozen=True, slots=True)
class Summary:
    """How a run ended."""

    steps: int
    samples: int
    final_accuracy: float | None
    """The last one measured; ``None`` where the run was stopped before any."""
    final_loss: float | None
    bytes_sent: int
    duration_s: float
    time_s: TimeSplit
    stopped: bool
    schedule_nbytes: int = 0
    """The most memory that the schedule took up beside model, gradient and optimizer."""

    def to_json(self) -> dict[str, Json]:
        """For telemetry and ``--json``."""
        return {
            "final_accuracy": self.final_accuracy,
            "final_loss": self.final_loss,
            "steps": self.steps,
            "samples": self.samples,
            "bytes_sent_per_replica": self.bytes_sent,
            "schedule_bytes_per_replica": self.schedule_nbytes,
            "duration_s": self.duration_s,
            "time_s": self.time_s.to_json(),
            "stopped": self.stopped,
        }
