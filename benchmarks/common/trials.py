"""Trainings in virtual time that benchmarks compare."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import Console
from torch import nn

from benchmarks.common.kept import Kept
from benchmarks.common.worlds import replicas_in
from farflung.config import Training
from farflung.replica import Replica
from farflung.runtime import VirtualWorld
from farflung.types import Workload
from farflung.workloads import workload

__all__ = ["SOURCES", "WORLD", "Trial", "Trials"]

SOURCES = [
    "src/farflung/codecs/*.py",
    "src/farflung/reducers/**/*.py",
    "src/farflung/replica/*.py",
    "src/farflung/schedules/*.py",
    "src/farflung/sampling/*.py",
    "src/farflung/workloads/*.py",
]
"""What a training may depend on, besides its own settings."""
WORLD = [
    *SOURCES,
    "src/farflung/comm/collectives/*.py",
    "src/farflung/comm/virtual/*.py",
    "src/farflung/network/*.py",
    "src/farflung/runtime/virtual.py",
    "benchmarks/common/runs.py",
    "benchmarks/common/shaped.py",
    "benchmarks/common/simulated.py",
    "benchmarks/common/workers.py",
    "benchmarks/common/worlds.py",
]
"""What the time of a run in either world depends on, besides its own settings."""


@dataclass(frozen=True)
class Trial:
    """One training in virtual time.

    Args:
      parts: members of the recipe.
      workload: its name.
      replicas: how many.
      batch_size: samples per replica and step.
      steps: updates.
      learning_rate: of the first step; falls linearly to 0, so that the last steps add little noise.
      momentum: of SGD.
      weight_decay: of SGD.
      seed: of everything.
    """

    parts: dict[str, str] = field(default_factory=dict)
    workload: str = "cifar10/vgg"
    replicas: int = 4
    batch_size: int = 16
    steps: int = 1000
    learning_rate: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 1e-4
    seed: int = 0

    def run(self) -> float:
        """Test accuracy at the end, a share; of the mean parameters where they differ."""
        torch.set_num_threads(1)
        task = cast("Workload", _ChannelsLast(workload(self.workload)))
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

        async def train(replica: Replica) -> float:
            for step in range(self.steps):
                for settings in replica.optimizer.param_groups:
                    settings["lr"] = self.learning_rate * (1 - step / self.steps)
                await replica.step()
            await replica.flush()
            return (await replica.evaluate()).metric

        return world.run([train(replica) for replica in replicas_in(world, task, training, self.parts)])[0]


class _ChannelsLast:
    """A workload whose model keeps channels innermost: faster on these processors, and rounded otherwise."""

    def __init__(self, task: Workload) -> None:
        self._task = task

    def model(self, generator: torch.Generator) -> nn.Module:
        return self._task.model(generator).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


class Trials:
    """Trainings by their settings, kept in ``results/trials.jsonl``.

    Args:
      folder: of the benchmark.
      quick: two steps of a quadratic, whose score is no accuracy, and nothing is kept.
    """

    def __init__(self, folder: Path, *, quick: bool) -> None:
        self._kept, self._quick = Kept(folder / "results" / "trials.jsonl", quick=quick), quick

    def accuracy(self, trial: Trial) -> float:
        """Of one training, in percent."""
        if self._quick:
            trial = replace(trial, workload="synthetic/quadratic", replicas=2, steps=2, batch_size=8)

        def train() -> dict[str, float]:
            Console(stderr=True).print(
                f"training {trial.parts}, rate {trial.learning_rate:g}, seed {trial.seed}", highlight=False
            )
            return {"accuracy": 100 * trial.run()}

        return float(self._kept.once(asdict(trial), train, watched=SOURCES)["accuracy"])

    def best(self, trial: Trial, rates: Sequence[float], seeds: Sequence[int]) -> tuple[list[float], float]:
        """The accuracy of each seed at the learning rate that is best for the first seed, and that rate.

        Rates are tried from the first on, until one is worse than the one before.
        """
        rate, *others = rates[:1] if self._quick else rates
        for other in others:
            tried = [replace(trial, learning_rate=one, seed=seeds[0]) for one in (rate, other)]
            if self.accuracy(tried[1]) < self.accuracy(tried[0]):
                break
            rate = other
        return [self.accuracy(replace(trial, learning_rate=rate, seed=seed)) for seed in seeds], rate
