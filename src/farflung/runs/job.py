"""What the process that starts a run's workers on this machine tells them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from farflung.runs.folder import RunFolder
from farflung.types import Json

__all__ = ["Job"]


@dataclass(frozen=True, slots=True)
class Job:
    """One run on workers of this machine.

    Args:
      folder: the run's; it has been made.
      resumed: whether the run goes on from a checkpoint in it.
      workers: how many.
      events: the datagram socket on which whoever started them listens; see :mod:`farflung.runs.events`.
      meeting: a file of their own through which they find each other.
      device: what to train on.
      pace: a device whose pace to keep; empty: as fast as they can.
      network: what lies between them, by name or as a TOML file; empty: that is not known.
      model: the folder of the model of that network whose pace to keep; empty: none.
    """

    folder: str
    resumed: bool
    workers: int
    events: str
    meeting: str
    device: str
    pace: str
    network: str
    model: str

    @property
    def files(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(Path(self.folder), resumed=self.resumed)

    def to_json(self) -> dict[str, Json]:
        """For a command line."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        return cls(**told)
