"""What a run gives back."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor
from typing_extensions import override

from farflung.data import Share
from farflung.errors import DataError, MissingExtra
from farflung.files import reading
from farflung.runs.config import RunConfig, SimulatedConfig
from farflung.runs.folder import RunFolder, Scratch
from farflung.state_trees import load_tree
from farflung.telemetry import Event
from farflung.types import Json

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Run"]


@dataclass(frozen=True, slots=True)
class Run:
    """A run that has come to its end; printed, it is the table of its summary, or lines where rich is not installed.

    Args:
      config: what decided it.
      files: what it left behind.
      summary: of rank 0: ``final_accuracy``, ``final_loss``, ``steps``, ``samples``, ``bytes_sent_per_replica``,
        ``duration_s``, ``time_s`` by part, whether it was ``stopped``, and its ``partition``.
      shares: size and labels of each replica's share of the training set; nothing where all draw from the whole.
      scratch: keeps the files for as long as the run is known, where they have no folder of their own.
    """

    config: RunConfig
    files: RunFolder
    summary: Mapping[str, Json]
    shares: Sequence[Share] = ()
    scratch: Scratch | None = field(default=None, repr=False)

    @property
    def folder(self) -> Path:
        """Where its files are; gone with this object where no folder was asked for."""
        return self.files.path

    @property
    def simulated(self) -> bool:
        """Whether its times are those of a modelled clock."""
        return isinstance(self.config, SimulatedConfig)

    @property
    def events(self) -> dict[int, list[Event]]:
        """All that each rank has told of: steps, evaluations, checkpoints; see :mod:`farflung.telemetry`."""
        return self.files.events()

    @property
    def sent(self) -> dict[str, dict[int, list[int]]]:
        """Payload bytes that each rank has sent to each other, by :class:`farflung.comm.Purpose` and sender."""
        from farflung.report import sent_by_kind

        return sent_by_kind(self.events)

    def state_dict(self) -> dict[str, Tensor]:
        """Parameters and buffers of the trained model, as they were evaluated: for ``load_state_dict``.

        Raises:
          CheckpointError: there are none, or they are damaged.
        """
        return load_tree(self.files.model)

    def table(self) -> Table:
        """The summary for people."""
        from farflung.report import summary_table

        with reading(self.files.summary, "damaged; its figures cannot be told", DataError):
            return summary_table(self.summary, simulated=self.simulated)

    def keep(self, folder: Path | str) -> Path:
        """Copies its files to a folder that is not there yet.

        Returns:
          That folder.
        """
        return Path(shutil.copytree(self.folder, folder))

    @override
    def __str__(self) -> str:
        from farflung.report import as_lines, as_text

        try:
            return as_text(self.table())
        except MissingExtra:
            return as_lines(self.summary)
