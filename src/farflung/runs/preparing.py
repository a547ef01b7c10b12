"""From settings to a run that has been checked and can be made."""

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
from farflung.files import naming
from farflung.loggers import RunLog
from farflung.runs.config import RunConfig, RunOptions, Settings
from farflung.runs.folder import RunFolder, Scratch
from farflung.runs.result import Run
from farflung.types import Json

__all__ = ["Prepared", "prepared", "run_folder"]

C = TypeVar("C", bound=RunConfig)


@dataclass(frozen=True, slots=True)
class Prepared(Generic[C]):
    """A run that has been checked and not begun.

    Args:
      config: what decides it.
      files: where it will be kept.
      shares: size and labels of each replica's share; nothing where all draw from the whole set.
      options: where it is kept, and what it runs on.
      scratch: keeps the files where they have no folder of their own.
      store: where the ranks have agreed on a new folder, and meet.
    """

    config: C
    files: RunFolder
    shares: Sequence[Share] = ()
    options: RunOptions = RunOptions()
    scratch: Scratch | None = field(default=None, repr=False)
    store: dist.Store | None = field(default=None, repr=False)

    def begun(self) -> AbstractContextManager[None]:
        """Makes the folder; inside, no other process makes a run there.

        Raises:
          BadInput: another process makes a run there, another run is in it, it cannot be written, or ``replay`` is no
            decision log.
        """
        return self.files.begun(self.config.to_json(), self.options.replay)

    def log(self) -> RunLog:
        """What logs the run's figures where ``log_to`` says.

        Raises:
          BadInput: there is no such logger, or it is not installed.
        """
        told = {**self.config.to_json(), "command": self.config.command, "folder": str(self.files.path)}
        return RunLog(self.options.log_to, self.files.path, title=self.config.title, config=told)

    def ended(self, summary: dict[str, Json]) -> Run:
        """The run, once it has been made."""
        return Run(self.config, self.files, summary, self.shares, self.scratch)


def prepared(
    kind: type[C],
    *layers: Settings,
    options: RunOptions = RunOptions(),
    check: bool = True,
    scratch: bool = False,
    folder: Callable[[str], Path] | None = None,
) -> Prepared[C]:
    """Resolves settings, finds a folder, and finds out what cannot work.

    Args:
      kind: of configuration.
      layers: settings by name; later ones win, and all of them over those of the run that is resumed.
      options: where the run is kept, and what it runs on.
      check: whether to look at the data and at checkpoints too.
      scratch: where the options name no folder: keep the run in a folder that goes with it, not in a new one under
        ``runs/``.
      folder: names a new folder for a run of such a title; :func:`run_folder` when not given.

    Raises:
      BadInput: says what and what to do.
    """
    out, resume = options.out, options.resume
    stored = {} if resume is None else kind.stored_in(RunFolder(Path(resume)))
    kept: Scratch | None = None
    with nullcontext() if resume is None else naming(f"--resume {resume}"):  # what is wrong may be in there
        config = kind.resolve(stored, *layers)
        if resume is not None:
            if out is not None and Path(out) != Path(resume):
                raise ConfigError(
                    "--out and --resume name different folders: a run resumes in its own folder"
                )
            path = Path(resume)
        elif out is not None:
            path = Path(out)
        elif scratch:
            kept = Scratch()
            path = kept.path / "run"
        else:
            path = (folder or run_folder)(config.title)
        files, shares = RunFolder(path, resumed=resume is not None), list[Share]()
        if check:
            files.check()
            shares = config.check()
            if files.resumed:
                config.check_resumable(files)
    return Prepared(config, files, shares, options, kept)


def run_folder(title: str) -> Path:
    """Names a new folder under ``runs/``, by title and time, and by a number where there is one of that second."""
    stem = re.sub(r"[^\w.-]+", "-", title)
    name = f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = chain([name], (f"{name}-{number}" for number in count(2)))
    return next(path for path in map(Path("runs").joinpath, names) if not path.exists())
