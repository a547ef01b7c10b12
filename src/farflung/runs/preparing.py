"""Preparation of runs: settings are resolved and checked, and a folder is chosen."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain, count
from pathlib import Path
from typing import Generic, TypeVar

import torch.distributed as dist

from farflung.data import Share
from farflung.errors import ConfigError
from farflung.files import prefix_errors
from farflung.loggers import RunLog
from farflung.runs.config import RunConfig, RunOptions, Settings
from farflung.runs.folder import RunFolder, TempFolder
from farflung.runs.result import Run
from farflung.types import Json

__all__ = ["PreparedRun", "format_stem", "name_run_folder", "prepare_run"]

C = TypeVar("C", bound=RunConfig)

_MAX_STEM = 120
"""Largest number of characters of a folder's name before the time."""


@dataclass(frozen=True, slots=True)
class PreparedRun(Generic[C]):
    """Checked run that has not begun.

    Args:
      config: Configuration of the run.
      files: Folder of the run.
      shares: Size and labels of each replica's share; empty if all draw from all samples.
      options: Options of the run.
      temp_folder: Temporary folder of the files, if the run has no folder of its own.
      store: Store in which the ranks have agreed on a new folder and find each other.
    """

    config: C
    files: RunFolder
    shares: Sequence[Share] = ()
    options: RunOptions = RunOptions()
    temp_folder: TempFolder | None = field(default=None, repr=False)
    store: dist.Store | None = field(default=None, repr=False)

    def begin_run(self) -> AbstractContextManager[None]:
        """Creates the folder and locks it for the duration of the context.

        Raises:
          BadInput: Another process runs there, the folder holds another run or cannot be written, or ``replay`` is not
            a decision log.
        """
        return self.files.begin_run(self.config.to_json(), self.options.replay)

    def create_log(self) -> RunLog:
        """Creates the log of the run's metrics from ``log_to``.

        Raises:
          BadInput: A logger is unknown or not installed.
        """
        log_config = {**self.config.to_json(), "command": self.config.command, "folder": str(self.files.path)}
        return RunLog(self.options.log_to, self.files.path, title=self.config.title, config=log_config)

    def build_result(self, summary: dict[str, Json]) -> Run:
        """Builds the result of the completed run."""
        return Run(self.config, self.files, summary, self.shares, self.temp_folder)


def prepare_run(
    kind: type[C],
    *layers: Settings,
    options: RunOptions = RunOptions(),
    should_check: bool = True,
    is_temporary: bool = False,
    name_folder: Callable[[str], Path] | None = None,
) -> PreparedRun[C]:
    """Resolves settings, chooses a folder, and checks the run.

    Args:
      kind: Class of the configuration.
      layers: Settings by name; later layers override earlier ones, and all override those of a resumed run.
      options: Options of the run.
      should_check: True to check data and checkpoints too.
      is_temporary: True to use a temporary folder instead of a new one under ``runs/`` if the options name none.
      name_folder: Function that names a new folder from the run's title; by default :func:`name_run_folder`.

    Raises:
      BadInput: The run cannot work; the message states the remedy.
    """
    out, resume = options.out, options.resume
    stored_settings = {} if resume is None else kind.load_settings(RunFolder(Path(resume)))
    temp_folder: TempFolder | None = None
    # Errors may be in its settings.
    with nullcontext() if resume is None else prefix_errors(f"--resume {resume}"):
        config = kind.resolve(stored_settings, *layers)
        if resume is not None:
            if out is not None and Path(out) != Path(resume):
                raise ConfigError(
                    "--out and --resume name different folders: a run resumes in its own folder"
                )
            path = Path(resume)
        elif out is not None:
            path = Path(out)
        elif is_temporary:
            temp_folder = TempFolder()
            path = temp_folder.path / "run"
        else:
            path = (name_folder or name_run_folder)(config.title)
        files, shares = RunFolder(path, is_resumed=resume is not None), list[Share]()
        if should_check:
            files.check()
            shares = config.check()
            if files.is_resumed:
                config.check_resumable(files)
    return PreparedRun(config, files, shares, options, temp_folder)


def format_stem(title: str) -> str:
    """Formats a title as the beginning of a file name, without its end if it is long."""
    stem = re.sub(r"[^\w.=-]+", "-", title).strip("-")
    return stem.encode()[:_MAX_STEM].decode(errors="ignore").strip("-")


def name_run_folder(title: str) -> Path:
    """Names a new folder under ``runs/`` by title and time, with a number if the name exists."""
    name = f"{format_stem(title)}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(path for path in map(Path("runs").joinpath, names) if not path.exists())
