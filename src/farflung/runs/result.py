"""Result of a run."""

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
from farflung.files import wrap_read_errors
from farflung.runs.config import RunConfig, SimulatedConfig
from farflung.runs.folder import RunFolder, TempFolder
from farflung.state_trees import load_tree
from farflung.telemetry import Event
from farflung.types import Json

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Run"]


@dataclass(frozen=True, slots=True)
class Run:
    """Completed run, printed as the table of its summary, or as lines if rich is not installed.

    Args:
      config: Configuration of the run.
      files: Files of the run.
      summary: Summary of rank 0: ``final_accuracy``, ``final_loss``, ``steps``, ``samples``,
        ``bytes_sent_per_replica``, ``duration_s``, ``time_s`` by part, ``stopped``, and ``partition``.
      shares: Size and labels of each replica's share of the training set; empty if all draw from all samples.
      temp_folder: Temporary folder of the files, deleted with this object, if the run has no folder of its own.
    """

    config: RunConfig
    files: RunFolder
    summary: Mapping[str, Json]
    shares: Sequence[Share] = ()
    temp_folder: TempFolder | None = field(default=None, repr=False)

    @property
    def folder(self) -> Path:
        """Folder of the run, deleted with this object if no folder was given."""
        return self.files.path

    @property
    def is_simulated(self) -> bool:
        """Returns True for a run in virtual time."""
        return isinstance(self.config, SimulatedConfig)

    @property
    def events(self) -> dict[int, list[Event]]:
        """Events of each rank, such as steps, evaluations, checkpoints; see :mod:`farflung.telemetry`."""
        return self.files.load_events()

    @property
    def sent_nbytes_by_purpose(self) -> dict[str, dict[int, list[int]]]:
        """Numbers of payload bytes sent to each rank, by :class:`farflung.comm.Purpose` and sender."""
        from farflung.report import read_traffic

        return read_traffic(self.events)

    def state_dict(self) -> dict[str, Tensor]:
        """Loads parameters and buffers of the trained model, as evaluated, for ``load_state_dict``.

        Raises:
          CheckpointError: The file is missing or damaged.
        """
        return load_tree(self.files.model_path)

    def build_table(self) -> Table:
        """Builds the table of the summary."""
        from farflung.report import render_summary_table

        with wrap_read_errors(self.files.summary_path, "damaged; its figures cannot be told", DataError):
            return render_summary_table(self.summary, is_simulated=self.is_simulated)

    def copy_to(self, folder: Path | str) -> Path:
        """Copies the files to a new folder and returns its path."""
        return Path(shutil.copytree(self.folder, folder))

    @override
    def __str__(self) -> str:
        from farflung.report import render_lines, render_text

        try:
            return render_text(self.build_table())
        except MissingExtra:
            return render_lines(self.summary)
