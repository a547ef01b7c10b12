"""Trainings that benchmarks compare: done once, and kept, so that a benchmark that is stopped goes on where it was."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.common.rows import source_hash
from benchmarks.common.worlds import replicas_in
from farflung.config import Training
from farflung.replica import Replica
from farflung.runtime import VirtualWorld
from farflung.workloads import workload

__all__ = ["SOURCES", "WORLD", "Trial", "Trials"]

SOURCES = [
    "src/farflung/codecs/*.py",
    "src/farflung/reducers/*.py",
    "src/farflung/replica/*.py",
    "src/farflung/schedules/*.py",
    "src/farflung/sampling/*.py",
    "src/farflung/workloads/*.py",
]
"""What a training depends on, besides its own settings."""
WORLD = [
    *SOURCES,
    "src/farflung/comm/collectives/*.py",
    "src/farflung/comm/virtual/*.py",
    "src/farflung/network/*.py",
    "src/farflung/runtime/virtual.py",
    "benchmarks/common/*.py",
]
"""What a simulated time depends on, besides its own settings."""


@dataclass(frozen=True)
class Trial:
    """One training in virtual time.

    Args:
      parts: members of the recipe.
      workload: its name.
      replicas: how many.
      batch_size: samples per replica and step.
      steps: updates.
      learning_rate: constant.
      momentum: of SGD.
      weight_decay: of SGD.
      seed: of everything.
    """

    parts: dict[str, str] = field(default_factory=dict)
    workload: str = "cifar10/resnet8"
    replicas: int = 4
    batch_size: int = 32
    steps: int = 1000
    learning_rate: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 1e-4
    seed: int = 0

    @property
    def key(self) -> str:
        """Of its settings and of the sources."""
        said = json.dumps([asdict(self), source_hash(SOURCES)], sort_keys=True)
        return hashlib.sha256(said.encode()).hexdigest()[:16]

    def run(self) -> list[float]:
        """Test accuracy at 90 % and 95 % of the steps and at the end; of the mean parameters where they differ."""
        torch.set_num_threads(1)
        task = workload(self.workload)
        training = Training(
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            on_nonfinite="skip",
            seed=self.seed,
        )
        world = VirtualWorld(self.replicas)
        early = {round(0.9 * self.steps), round(0.95 * self.steps)} - {self.steps}

        async def train(replica: Replica) -> list[float]:
            scores = []
            for step in range(1, self.steps + 1):
                await replica.step()
                if step in early:
                    scores.append((await replica.evaluate()).metric)
            await replica.flush()
            return [*scores, (await replica.evaluate()).metric]

        return world.run([train(replica) for replica in replicas_in(world, task, training, self.parts)])[0]


class Trials:
    """Trainings by their settings, kept in ``results/trials.jsonl``.

    Args:
      folder: of the benchmark.
      quick: two steps of a quadratic, whose score is no accuracy, and nothing is kept.
    """

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self._path, self._quick = folder / "results" / "trials.jsonl", quick
        self._done: dict[str, list[float]] = {}
        if self._path.exists() and not quick:
            lines = (json.loads(line) for line in self._path.read_text(encoding="utf-8").splitlines() if line)
            self._done = {line["key"]: line["accuracy"] for line in lines}

    def accuracy(self, trial: Trial) -> list[float]:
        """Of one training, in percent."""
        if self._quick:
            trial = replace(trial, workload="synthetic/quadratic", replicas=2, steps=2, batch_size=8)
        if trial.key not in self._done:
            Console(stderr=True).print(
                f"training {trial.parts}, rate {trial.learning_rate:g}", highlight=False
            )
            self._done[trial.key] = [100 * score for score in trial.run()]
            if not self._quick:
                self._path.parent.mkdir(exist_ok=True)
                with self._path.open("a", encoding="utf-8") as file:
                    line: dict[str, Any] = {"key": trial.key, **asdict(trial)}
                    file.write(json.dumps({**line, "accuracy": self._done[trial.key]}) + "\n")
        return self._done[trial.key]

    def best(self, trial: Trial, rates: Sequence[float], seeds: Sequence[int]) -> tuple[list[float], float]:
        """The median accuracy of each seed at the learning rate that is best in the mean over seeds, and that rate."""
        found = {
            rate: [
                statistics.median(self.accuracy(replace(trial, learning_rate=rate, seed=seed)))
                for seed in seeds
            ]
            for rate in (rates[:1] if self._quick else rates)
        }
        rate = max(found, key=lambda one: statistics.fmean(found[one]))
        return found[rate], rate
