"""Trainings in virtual time that benchmarks compare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.utils.data import TensorDataset

from benchmarks.common.trainings import Trainings
from benchmarks.common.worlds import replicas_in
from farflung.config import Training
from farflung.data import PARTITIONS, Partition
from farflung.loop import Replica
from farflung.seeding import create_generator
from farflung.sim import VirtualWorld
from farflung.spec import build
from farflung.tasks import Pending
from farflung.types import Workload
from farflung.workloads import TorchWorkload, create_workload

__all__ = ["CONVERGED", "RATES", "Trial", "Trials"]

CONVERGED = 0.5
"""Points that twice the steps may gain."""
RATES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
"""Of learning, around that of a :class:`Trial`."""

T = TypeVar("T")


@dataclass(frozen=True)
class Trial:
    """One training in virtual time, in which nothing takes any time.

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
      partition: how the training set is split; ``None``: all draw from the whole.
    """

    parts: dict[str, Any] = field(default_factory=dict)
    workload: str = "cifar10/vgg"
    replicas: int = 4
    batch_size: int = 16
    steps: int = 1000
    learning_rate: float = 0.02
    momentum: float = 0.9
    weight_decay: float = 1e-4
    seed: int = 0
    partition: str | None = None

    @property
    def title(self) -> str:
        """What differs between the trials of a benchmark."""
        return f"{self.parts}, rate {self.learning_rate:g}, seed {self.seed}"

    def train(self) -> list[tuple[int, float]]:
        """The test accuracy at the end, in percent, after the number of steps; of the mean parameters."""
        return self.curve({self.steps})

    def curve(self, due: Collection[int]) -> list[tuple[int, float]]:
        """Numbers of steps that were due, and test accuracies after them in percent; the last at the end of the run."""

        async def train(replica: Replica) -> list[tuple[int, float]]:
            found, done = [], 0
            for steps in sorted(due):
                await self._train(replica, steps, since=done)
                if steps == self.steps:
                    await replica.flush()
                found.append((steps, 100 * (await replica.evaluate()).metric))
                done = steps
            return found

        return self._in_virtual_time(train)[0]

    async def _train(self, replica: Replica, steps: int, *, since: int = 0) -> None:
        for step in range(since, steps):
            for settings in replica.optimizer.param_groups:
                settings["lr"] = self.learning_rate * (1 - step / self.steps)
            await replica.step()

    def _in_virtual_time(self, train: Callable[[Replica], Coroutine[Pending[Any], None, T]]) -> list[T]:
        torch.set_num_threads(1)
        task = cast("Workload", _Prepared(create_workload(self.workload)))
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
        shares = None
        if self.partition is not None:
            how: Partition = build("partition", self.partition, PARTITIONS)
            shares = how.split(task.load_datasets()[0], self.replicas, seed=self.seed)
        return world.run(
            [train(one) for one in replicas_in(world, task, training, self.parts, shares=shares)]
        )


def two_clouds() -> Workload:
    """Points around two centres and a linear model, which have an accuracy; for quick runs alone."""
    labels = torch.arange(64) % 2
    points = torch.randn(64, 8, generator=create_generator(0, "two clouds")) + labels[:, None]
    data = TensorDataset(points, labels)
    return TorchWorkload(partial(nn.Linear, 8, 2), data, data, nn.functional.cross_entropy)


class _Prepared:
    """A workload whose model keeps channels innermost: faster on these processors, and rounded otherwise.

    Args:
      task: the workload.
    """

    def __init__(self, task: Workload) -> None:
        self._task = task

    def build_model(self, generator: torch.Generator) -> nn.Module:
        return self._task.build_model(generator).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


class Trials:
    """The trainings of a benchmark, stored in ``results/trainings.jsonl``.

    Args:
      trainings: that are stored.
      quick: two steps of a linear model, whose accuracy means nothing, and nothing is stored.
    """

    def __init__(self, trainings: Trainings[Trial, list[list[float]]], *, quick: bool) -> None:
        self._trainings, self._quick = trainings, quick

    def accuracies(self, trials: Sequence[Trial]) -> list[float]:
        """Of several trainings, in percent."""
        if self._quick:
            tiny: dict[str, Any] = {
                "workload": "benchmarks.common.trials:two_clouds",
                "replicas": 2,
                "steps": 2,
                "batch_size": 8,
            }
            return [replace(trial, **tiny).train()[-1][1] for trial in trials]
        return [curve[-1][1] for curve in self._trainings.curves(trials)]

    def unconverged(self, reference: Trial) -> str:
        """Why accuracies at the steps of a reference compare with no published one; empty where they do.

        The reference has converged where twice the steps gain less than half a point.
        """
        if self._quick:
            return ""
        short, long = self.accuracies([reference, replace(reference, steps=2 * reference.steps)])
        if long - short < CONVERGED:
            return ""
        return (
            f"the baseline has not converged after {reference.steps:,} steps: "
            f"twice as many gain {long - short:.1f} points"
        )

    def best(self, trial: Trial, rates: Sequence[float], seeds: Sequence[int]) -> tuple[list[float], float]:
        """The accuracy of each seed at the learning rate that is best for the first seed, and that rate.

        Rates, which rise, are tried from that of the trial on, upwards and downwards, for as long as that is better; of
        two that are as good, as where both diverge, the smaller is taken.
        """
        at = rates.index(trial.learning_rate)
        while not self._quick:
            near = [place for place in (at - 1, at, at + 1) if 0 <= place < len(rates)]
            found = self.accuracies(
                [replace(trial, learning_rate=rates[place], seed=seeds[0]) for place in near]
            )
            better = near[found.index(max(found))]
            if better == at:
                break
            at = better
        rate = rates[at]
        return self.accuracies([replace(trial, learning_rate=rate, seed=seed) for seed in seeds]), rate
