"""``farflung train``: trains on workers of this machine, or joins a run that torchrun has started."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from farflung.cli.join import work
from farflung.cli.launch import launch
from farflung.cli.progress import Progress
from farflung.cli.run import RunConfig, RunFolder
from farflung.errors import ConfigError
from farflung.report import run_picture, summary_table
from farflung.types import Json

__all__ = ["Train"]


@dataclass(frozen=True)
class Train:
    """Train a model on several workers of this machine.

    Under torchrun the workers are torchrun's and this command joins them:
    torchrun --nproc-per-node 4 -m farflung train ...
    """

    workload: str | None = None
    """What to train; fashion-mnist/cnn when not given."""
    recipe: str | None = None
    """How to train together; synchronous when not given."""
    workers: int | None = None
    """Replicas on this machine; 2 when not given."""
    steps: int | None = None
    """Updates of the parameters; the workload's own number when not given."""
    batch_size: int | None = None
    """Samples per replica and step."""
    learning_rate: float | None = None
    """Of the optimizer."""
    momentum: float | None = None
    """Of SGD."""
    weight_decay: float | None = None
    """Of the optimizer."""
    optimizer: str | None = None
    """sgd or adam."""
    seed: int | None = None
    """Everything random derives from it."""
    codec: str | None = None
    """Instead of the recipe's, e.g. truncate16."""
    collective: str | None = None
    """Instead of the recipe's: direct, ring, parameter_server, multi_parameter_server, native."""
    schedule: str | None = None
    """Instead of the recipe's."""
    data: str | None = None
    """Where data comes from: auto, packaged or full, for workloads that offer the choice."""
    evaluate_every: int | None = None
    """Steps between evaluations; 0: at the end only; a tenth of the steps when not given."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; 0: at the end only; a fifth of the steps when not given."""
    deadline: float | None = None
    """Seconds that any message may take before its sender counts as lost; 60 when not given."""
    out: Path | None = None
    """The run's folder; a new one under runs/ when not given."""
    resume: Path | None = None
    """Continue the run in this folder from its last checkpoint; other options change its settings."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the summary as JSON on stdout and nothing else."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        config = self._config()
        folder = self._folder(config)
        if "WORLD_SIZE" in os.environ and "RANK" in os.environ:
            return self._join(config, folder)
        config.check()
        if folder.resumed:
            config.check_resumable(folder)
        with Progress(quiet=self.quiet or self.json) as progress:
            summary = launch(config, folder, progress)
        self._report(config, folder, summary)
        return 130 if summary.get("interrupted") else 0

    def _config(self) -> RunConfig:
        given: dict[str, Json] = {
            name: getattr(self, name) for name in RunConfig.fields() if getattr(self, name, None) is not None
        }
        if self.resume is not None:
            return RunConfig.resolve(RunFolder(self.resume).stored_config(), given)
        return RunConfig.resolve({}, given)

    def _folder(self, config: RunConfig) -> RunFolder:
        if self.resume is not None:
            if self.out is not None and self.out != self.resume:
                raise ConfigError(
                    "--out and --resume name different folders: a run resumes in its own folder"
                )
            return RunFolder(self.resume, resumed=True)
        if self.out is not None:
            return RunFolder(self.out)
        stem = re.sub(r"[^\w.-]+", "-", f"{config.workload}-{config.recipe}")
        # All ranks of a torchrun job must agree on the name.
        label = os.environ.get("TORCHELASTIC_RUN_ID") or time.strftime("%Y%m%d-%H%M%S")
        return RunFolder(Path("runs") / f"{stem}-{label}")

    def _join(self, config: RunConfig, folder: RunFolder) -> int:
        rank = int(os.environ["RANK"])
        if rank == 0:
            folder.create(config)
        with Progress(quiet=self.quiet or self.json or rank != 0) as progress:
            summary = work(config, folder, progress)
        if rank == 0:
            self._report(config, folder, summary)
        return 0

    def _report(self, config: RunConfig, folder: RunFolder, summary: Mapping[str, Json]) -> None:
        run_picture(
            folder.events(), folder.picture, title=f"{config.workload}, {config.recipe}", simulated=False
        )
        if self.json:
            print(json.dumps({**summary, "folder": str(folder.path)}))
            return
        console = Console(file=sys.stdout)
        console.print(summary_table(summary))
        console.print(f"picture    {folder.picture}", soft_wrap=True, highlight=False)
        console.print(f"telemetry  {folder.telemetry(0)}", soft_wrap=True, highlight=False)
