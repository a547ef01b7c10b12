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
      scratch: a folder of their own: there whoever started them listens (:mod:`farflung.runs.events`), and there they
        find each other; gone with whoever started them.
      device: what to train on.
      pace: a device whose pace to keep; ``None``: as fast as they can.
    """

    folder: str
    resumed: bool
    workers: int
    scratch: str
    device: str
    pace: str | None

    @property
    def files(self) -> RunFolder:
        """The run's folder."""
        return RunFolder(Path(self.folder), resumed=self.resumed)

    @property
    def events(self) -> str:
        """The datagram socket on which whoever started them listens."""
        return f"{self.scratch}/events"

    @property
    def meeting(self) -> Path:
        """The file through which they find each other."""
        return Path(self.scratch, "meeting")

    def to_json(self) -> dict[str, Json]:
        """For :meth:`from_json` in another process."""
        return asdict(self)

    @classmethod
    def from_json(cls, told: dict[str, Any]) -> Self:
        """The inverse of :meth:`to_json`."""
        return cls(**told)
