"""``farflung train``: trains on workers of this machine, or joins a run that torchrun has started."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from farflung.cli.join import Reach, work
from farflung.cli.launch import launch
from farflung.cli.progress import Progress
from farflung.cli.run import RunConfig, RunFolder
from farflung.cli.settings import option_types, read_settings
from farflung.comm.keys import load_keys
from farflung.data import Share
from farflung.errors import ConfigError
from farflung.report import partition_picture, partition_table, run_picture, summary_table
from farflung.types import Json

__all__ = ["Train"]


@dataclass(frozen=True)
class Train:
    """Train a model on several workers of this machine.

    Under torchrun the workers are torchrun's and this command joins them, on one machine or several:
    torchrun --nproc-per-node 4 -m farflung train ...
    """

    config: Path | None = None
    """Take settings from this file: TOML with the names of options as keys, or the config.json of a run. Options on
    the command line win over it."""
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
    clip_norm: float | None = None
    """Largest norm of the gradient that the optimizer steps on; 0: no limit."""
    on_nonfinite: str | None = None
    """Where a replica's loss is NaN or infinite: stop the run, skip the update, or exclude that replica."""
    seed: int | None = None
    """Everything random derives from it."""
    codec: str | None = None
    """Instead of the recipe's, e.g. truncate16."""
    collective: str | None = None
    """Instead of the recipe's: direct, all_gather, ring, parameter_server, multi_parameter_server, auto, native."""
    schedule: str | None = None
    """Instead of the recipe's."""
    data: str | None = None
    """Where data comes from: auto, packaged or full, for workloads that offer the choice."""
    partition: str | None = None
    """How replicas share the training set: shared, all draw from the whole; or a share each: iid, labels(k=1),
    dirichlet(alpha=0.5), by-order. shared when not given."""
    evaluate_every: int | None = None
    """Steps between evaluations; 0: at the end only; a tenth of the steps when not given."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; 0: at the end only; a fifth of the steps when not given."""
    deadline: float | None = None
    """Seconds that any message may take before its sender counts as lost; 60 when not given."""
    encrypt: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Encrypt messages within this machine too, to see what it costs; those between machines always are."""
    interface: str | None = None
    """Under torchrun on several machines: the address, or the name of the network interface, at which the others
    reach this one; when not given, the one on the way to the master address."""
    keys: Path | None = None
    """Under torchrun on several machines: the folder made by farflung keys, with this machine's secret key and the
    public keys of all; when not given, keys are made for the run and exchanged through torchrun's store, so whoever
    reaches that store can take part."""
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
        if self.config is None:
            return self._train({})
        said = read_settings(self.config, option_types(Train, without=("config", "resume")))
        of_the_run = {name: value for name, value in said.items() if name in RunConfig.fields()}
        others = {name: value for name, value in said.items() if name not in of_the_run}
        missing = {name: value for name, value in others.items() if not getattr(self, name)}
        return replace(self, **missing)._train(of_the_run)  # type: ignore[arg-type]

    def _train(self, filed: Mapping[str, Json]) -> int:
        config = self._config(filed)
        folder = self._folder(config)
        if _under_torchrun():
            return self._join(config, folder)
        if self.interface is not None or self.keys is not None:
            raise ConfigError(
                "--interface and --keys are for several machines: start this under torchrun there"
            )
        task = config.make_workload()
        shares = config.check(task)
        if folder.resumed:
            config.check_resumable(folder, task)
        self._show(config, shares)
        with Progress(quiet=self.quiet or self.json) as progress:
            summary = launch(config, folder, progress)
        self._report(config, folder, {**summary, "partition": config.split_json(shares)}, shares)
        return 130 if summary.get("interrupted") else 0

    def _config(self, filed: Mapping[str, Json]) -> RunConfig:
        said = {name: getattr(self, name) for name in RunConfig.fields()}
        given: dict[str, Json] = {
            name: value for name, value in said.items() if value is not None and value is not False
        }
        if _under_torchrun():
            size = int(os.environ["WORLD_SIZE"])
            if given.setdefault("workers", size) != size:
                raise ConfigError(f"--workers {self.workers}: torchrun has started {size}")
        stored = {} if self.resume is None else RunFolder(self.resume).stored_config()
        return RunConfig.resolve(stored, filed, given)

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
        reach = Reach(self.interface, None if self.keys is None else load_keys(self.keys))
        task = config.make_workload()
        shares: list[Share] = []
        if rank == 0:
            shares = config.check(task)
            folder.create(config)
            self._show(config, shares)
        with Progress(quiet=self.quiet or self.json or rank != 0) as progress:
            summary = work(config, folder, progress, reach, task)
        if rank == 0:
            self._report(config, folder, summary, shares)
        return 0

    def _show(self, config: RunConfig, shares: Sequence[Share]) -> None:
        """How the training set is split, where it is."""
        if shares and not (self.quiet or self.json):
            Console(stderr=True).print(partition_table(shares, config.partition))

    def _report(
        self, config: RunConfig, folder: RunFolder, summary: Mapping[str, Json], shares: Sequence[Share]
    ) -> None:
        title = f"{config.workload}, {config.recipe}"
        run_picture(folder.events(), folder.picture, title=title, simulated=False)
        if shares:
            partition_picture(
                shares, folder.partition_picture, title=f"{config.workload}, {config.partition}"
            )
        if self.json:
            print(json.dumps({**summary, "folder": str(folder.path)}))
            return
        console = Console(file=sys.stdout)
        console.print(summary_table(summary))
        console.print(f"picture    {folder.picture}", soft_wrap=True, highlight=False)
        if shares:
            console.print(f"shares     {folder.partition_picture}", soft_wrap=True, highlight=False)
        console.print(f"telemetry  {folder.telemetry(0)}", soft_wrap=True, highlight=False)


def _under_torchrun() -> bool:
    return "WORLD_SIZE" in os.environ and "RANK" in os.environ
