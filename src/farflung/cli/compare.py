"""``farflung compare``: which way of training wins on which network, found out in virtual time."""

from __future__ import annotations

import json
import re
import shutil
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from farflung.cli.counting import Counting
from farflung.cli.run import RunFolder
from farflung.cli.simulation import DEVICE, SimulatedConfig, asked_to_stop, retime, simulate, timing_decisions
from farflung.cli.variants import variant
from farflung.errors import ConfigError
from farflung.report import Course, compare_courses, comparison_picture, comparison_table
from farflung.report.summary import score_words
from farflung.telemetry import read_events
from farflung.types import Json

__all__ = ["Compare"]


@dataclass(frozen=True)
class Compare:
    """Compare recipes on networks in virtual time: time to a target, accuracy, bytes, and where the time goes.

    Each recipe trains once for each seed, with real arithmetic; what it takes on the other networks is timed from that
    run, where its learning does not depend on the network. A comparison that was interrupted goes on where it stopped
    when it is started again with the same --out.
    """

    recipes: tuple[str, ...] = ("synchronous", "synchronous(codec=int8)", "parameter_server")
    """Recipes, each with changes in brackets if wished: synchronous(codec=topk(density=0.01), learning_rate=0.02).
    The first is what the others are measured against."""
    networks: tuple[str, ...] = ("wifi-10mbps",)
    """Networks, by name or as TOML files."""
    seeds: tuple[int, ...] = (0,)
    """Seeds."""
    target: float | None = None
    """The score to reach; when not given, the best that every run reached."""
    workload: str | None = None
    """What to train; fashion-mnist/cnn when not given."""
    workers: int | None = None
    """Replicas; 4 when not given and the networks leave it open."""
    steps: int | None = None
    """Updates of the parameters; the workload's own number when not given."""
    batch_size: int | None = None
    """Samples per replica and step."""
    learning_rate: float | None = None
    """Of the optimizer."""
    momentum: float | None = None
    """Of SGD."""
    data: str | None = None
    """Where data comes from: auto, packaged or full, for workloads that offer the choice."""
    partition: str | None = None
    """How replicas share the training set; shared when not given."""
    device: str = DEVICE
    """What each replica computes on: a name or a TOML file."""
    evaluate_every: int | None = None
    """Steps between evaluations; a twentieth of the steps when not given."""
    out: Path | None = None
    """The folder of all runs, the table and the picture; a new one under runs/ when not given."""
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Print the rows as JSON on stdout and nothing else."""
    quiet: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Show no progress."""

    def run(self) -> int:
        """Carries it out; returns the exit code."""
        rows = self._plan()
        out = self.out or Path("runs") / f"compare-{time.strftime('%Y%m%d-%H%M%S')}"
        courses = self._courses(rows, out)
        if courses is None:
            return 130
        target = min(course.best for course in courses) if self.target is None else self.target
        table = compare_courses(courses, target)
        first = rows[0][1][0]
        title = f"{first.workload}, {first.workers} replicas on {self.device}, simulated"
        picture = out / "compare.png"
        comparison_picture(courses, picture, title=title, target=target)
        if self.json:
            found: dict[str, Json] = {"simulated": True, "target": target, "device": self.device}
            print(json.dumps({**found, "rows": [row.to_json() for row in table], "folder": str(out)}))
            return 0
        console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else 160)
        console.print(comparison_table(table, target))
        if any(row.time_to_target_s is None for row in table):
            console.print(f"not every run reached {' '.join(score_words(target))}; --target sets another")
        console.print(f"picture    {picture}", soft_wrap=True, highlight=False)
        console.print(f"runs       {out / 'runs'}", soft_wrap=True, highlight=False)
        return 0

    def _plan(self) -> list[tuple[str, list[SimulatedConfig]]]:
        """For each recipe and seed the runs on all networks; everything is checked before anything begins."""
        for name in ("recipes", "networks", "seeds"):
            given: Sequence[object] = getattr(self, name)
            if not given:
                raise ConfigError(f"--{name}: give at least one")
            if len(set(given)) < len(given):
                raise ConfigError(f"--{name}: one of them is there twice")
        names = (
            "workload",
            "workers",
            "steps",
            "batch_size",
            "learning_rate",
            "momentum",
            "data",
            "partition",
        )
        said: dict[str, Json] = {
            name: getattr(self, name) for name in names if getattr(self, name) is not None
        }
        said["device"] = self.device
        rows = []
        for recipe in self.recipes:
            for seed in self.seeds:
                asked = {**said, **variant(recipe), "seed": seed}
                configs = [SimulatedConfig.resolve({**asked, "network": name}) for name in self.networks]
                every = self.evaluate_every
                if every is None:
                    every = max(1, configs[0].steps // 20)
                rows.append((recipe, [replace(c, evaluate_every=every, checkpoint_every=0) for c in configs]))
        sizes = {config.workers for _, configs in rows for config in configs}
        if len(sizes) > 1:
            raise ConfigError("the networks are of different numbers of nodes: say how many with --workers")
        task = rows[0][1][0].make_workload()
        for _, configs in rows:
            for config in configs:
                config.check(task)
        return rows

    def _courses(
        self, rows: Sequence[tuple[str, Sequence[SimulatedConfig]]], out: Path
    ) -> list[Course] | None:
        """Makes all runs that are not there yet; ``None`` where somebody asked to stop."""
        task = rows[0][1][0].make_workload()
        total = sum(configs[0].steps for _, configs in rows)
        courses = []
        with (
            Counting(total, len(rows), quiet=self.quiet or self.json) as count,
            asked_to_stop() as asked,
        ):
            for recipe, configs in rows:
                count.begin(f"{recipe}, seed {configs[0].seed}", configs[0].steps)
                first: RunFolder | None = None
                for config in configs:
                    folder = RunFolder(out / "runs" / _name(recipe, config))
                    if not _is_there(folder, config):
                        if first is None or timing_decisions(first):
                            folder.create(config)
                            simulate(config, folder, count, task, stop_asked=asked.is_set, checkpointed=False)
                            if asked.is_set():
                                shutil.rmtree(folder.path)
                        else:
                            retime(config, first, folder, task, lambda event: None)
                    if asked.is_set():
                        return None
                    first = first or folder
                    summary = json.loads(folder.summary.read_text(encoding="utf-8"))
                    events = read_events(folder.telemetry(0))
                    courses.append(Course.of(recipe, config.network, config.seed, events, summary))
                count.end()
        return courses


def _name(recipe: str, config: SimulatedConfig) -> str:
    """The name of a run's folder."""
    stem = re.sub(r"[^\w.=-]+", "-", recipe).strip("-")
    return f"{stem}-{Path(config.network).stem}-seed-{config.seed}"


def _is_there(folder: RunFolder, config: SimulatedConfig) -> bool:
    """Whether a run has been made already; one that was cut short is removed.

    Raises:
      ConfigError: another run is in its place.
    """
    if not folder.config.exists():
        return False
    if folder.stored_config(SimulatedConfig) != config.to_json():
        raise ConfigError(
            f"{folder.path} holds a run with other settings: choose another --out, or give the same options"
        )
    if folder.summary.exists():
        return True
    shutil.rmtree(folder.path)
    return False
