"""What all commands that make a run have in common: its options, its folder, and what it says at its end."""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar

import tyro
from rich.console import Console

from farflung.cli.run import RunConfig, RunFolder
from farflung.cli.settings import option_types, read_settings
from farflung.comm import COLLECTIVES
from farflung.data import Share
from farflung.errors import ConfigError
from farflung.report import partition_picture, partition_table, run_picture, summary_table
from farflung.types import Json

__all__ = ["RunOptions", "finish"]


@dataclass(frozen=True)
class RunOptions:
    """The options of a run, in either world."""

    kind: ClassVar[type[RunConfig]] = RunConfig
    elsewhere: ClassVar[frozenset[str]] = frozenset()
    """Keys of files that the command for the other world has, and this one leaves alone."""

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
    learning_rate_schedule: str | None = None
    """What becomes of the learning rate: constant, linear, cosine(warmup=500, final=0.1), step(every=1000, gamma=0.1)
    or step(milestones=(1000, 1500)); by steps, or by='samples'. constant when not given."""
    momentum: float | None = None
    """Of SGD."""
    weight_decay: float | None = None
    """Of the optimizer."""
    optimizer: str | None = None
    """sgd, sgd(nesterov=True), adam or adamw(betas=(0.9, 0.95), eps=1e-8); sgd when not given."""
    clip_norm: float | None = None
    """Largest norm of the gradient that the optimizer steps on; 0: no limit."""
    on_nonfinite: str | None = None
    """Where a replica's loss is NaN or infinite: stop the run, skip the update, or exclude that replica."""
    seed: int | None = None
    """Everything random derives from it."""
    codec: str | None = None
    """Instead of the recipe's, e.g. truncate16."""
    reducer: str | None = None
    """Instead of the recipe's: codec, or codec(phases='two') or codec(phases='hops') for another way of the codec's
    payloads; or, without a codec, powersgd(rank=2) or shared_scale_qsgd(bits=4)."""
    collective: Annotated[
        str | None, tyro.conf.arg(help=f"Instead of the recipe's: {', '.join(COLLECTIVES)}.")
    ] = None
    schedule: str | None = None
    """Instead of the recipe's."""
    bucket_nbytes: int | None = None
    """Instead of the recipe's 26214400: a bucket of gradients is sent once it holds as many bytes."""
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
    out: Path | None = None
    """The run's folder; a new one under runs/ when not given."""
    resume: Path | None = None
    """Continue the run in this folder from its last checkpoint; other options change its settings."""
    replay: Path | None = None
    """Decide again what an earlier run decided, from its decisions.jsonl; a new run then ends as that one did."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the summary as JSON on stdout and nothing else."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        if self.config is None:
            return self.start({})
        known = option_types(type(self), without=("config", "resume"))
        said = read_settings(self.config, known, ignored=self.elsewhere)
        of_the_run = {name: value for name, value in said.items() if name in self.kind.fields()}
        others = {name: value for name, value in said.items() if name not in of_the_run}
        missing = {name: value for name, value in others.items() if not getattr(self, name)}
        return replace(self, **missing).start(of_the_run)  # type: ignore[arg-type]

    def start(self, filed: Mapping[str, Json]) -> int:
        """Makes the run; ``filed`` are its settings from a file."""
        raise NotImplementedError

    def given(self) -> dict[str, Json]:
        """The settings on the command line."""
        said = {name: getattr(self, name, None) for name in self.kind.fields()}
        return {name: value for name, value in said.items() if value is not None and value is not False}

    def stored(self) -> dict[str, Json]:
        """The settings of the run that is resumed."""
        return {} if self.resume is None else RunFolder(self.resume).stored_config(self.kind)

    def folder(self, config: RunConfig) -> RunFolder:
        """Where the run is kept."""
        if self.resume is not None:
            if self.out is not None and self.out != self.resume:
                raise ConfigError(
                    "--out and --resume name different folders: a run resumes in its own folder"
                )
            return RunFolder(self.resume, resumed=True)
        if self.out is not None:
            return RunFolder(self.out)
        stem = re.sub(r"[^\w.-]+", "-", config.title)
        # All ranks of a torchrun job must agree on the name.
        label = os.environ.get("TORCHELASTIC_RUN_ID") or time.strftime("%Y%m%d-%H%M%S")
        return RunFolder(Path("runs") / f"{stem}-{label}")

    def show(self, config: RunConfig, shares: Sequence[Share]) -> None:
        """How the training set is split, where it is."""
        if shares and not (self.quiet or self.json):
            Console(stderr=True).print(partition_table(shares, config.partition))


def finish(
    config: RunConfig,
    folder: RunFolder,
    summary: Mapping[str, Json],
    shares: Sequence[Share],
    *,
    as_json: bool,
    simulated: bool = False,
) -> None:
    """Draws the pictures of a run and prints its summary."""
    run_picture(folder.events(), folder.picture, title=config.title, simulated=simulated)
    if shares:
        partition_picture(shares, folder.partition_picture, title=f"{config.workload}, {config.partition}")
    if as_json:
        print(json.dumps({**summary, "folder": str(folder.path)}))
        return
    console = Console(file=sys.stdout)
    console.print(summary_table(summary, simulated=simulated))
    console.print(f"picture    {folder.picture}", soft_wrap=True, highlight=False)
    if shares:
        console.print(f"shares     {folder.partition_picture}", soft_wrap=True, highlight=False)
    console.print(f"telemetry  {folder.telemetry(0)}", soft_wrap=True, highlight=False)
