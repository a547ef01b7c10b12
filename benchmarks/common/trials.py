"""Trainings in virtual time that benchmarks compare."""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, cast

import torch
from torch import nn

from benchmarks.common.first_steps import combined, digest, first_steps
from benchmarks.common.trainings import TRAINED, Trainings
from benchmarks.common.worlds import replicas_in
from farflung.config import Training
from farflung.data import PARTITIONS, Partition, Subset
from farflung.devices import DeviceProfile
from farflung.recipes import recipe
from farflung.replica import Replica
from farflung.runtime import VirtualWorld
from farflung.seeding import generator
from farflung.spec import build
from farflung.tasks import Pending
from farflung.types import Dataset, Workload
from farflung.workloads import workload

__all__ = ["RATES", "TRIED", "WORLD", "Trial", "Trials"]

WORLD = [
    "src/farflung/codecs/*.py",
    "src/farflung/reducers/**/*.py",
    "src/farflung/replica/**/*.py",
    "src/farflung/schedules/*.py",
    "src/farflung/sampling/*.py",
    "src/farflung/workloads/*.py",
    "src/farflung/comm/collectives/*.py",
    "src/farflung/comm/virtual/*.py",
    "src/farflung/network/*.py",
    "src/farflung/devices/*",
    "src/farflung/runtime/virtual.py",
    "benchmarks/common/runs.py",
    "benchmarks/common/shaped.py",
    "benchmarks/common/simulated.py",
    "benchmarks/common/workers.py",
    "benchmarks/common/worlds.py",
]
"""What the time of a run in either world depends on, besides its own settings."""
TRIED = [*TRAINED, "benchmarks/common/trials.py", "benchmarks/common/worlds.py"]
"""What a trial depends on, besides its own settings."""
RATES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28)
"""Of learning, around that of a :class:`Trial`."""
FEW = 500
"""Test samples that say whether scoring is what it was."""

T = TypeVar("T")


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
      partition: how the training set is split; ``None``: all draw from the whole.
      slow: how many times as long the last replica computes, with messages that take no time; 1: nothing takes any.
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
    slow: float = 1.0

    @property
    def title(self) -> str:
        """What differs between the trials of a benchmark."""
        return f"{self.parts}, rate {self.learning_rate:g}, seed {self.seed}"

    def first_steps(self) -> int:
        """Until everything that the recipe does has happened twice."""
        parts = recipe("synchronous").but(**self.parts).parts(self.seed)
        return first_steps(
            workload(self.workload).model(generator(self.seed, "model")),
            parts.schedule,
            parts.reducer,
            self.steps,
        )

    def digest(self, steps: int) -> str:
        """Of all replicas after the first steps, and again with their score once all that is under way is merged."""

        async def train(replica: Replica) -> str:
            await self._train(replica, steps)
            trained = digest(replica.model)
            await replica.flush()
            return combined([trained, digest(replica.model), repr((await replica.evaluate()).metric)])

        return combined(self._in_virtual_time(train, tested=FEW))

    def accuracy(self) -> float:
        """On the test set at the end, in percent; of the mean parameters where they differ."""
        return self.curve({self.steps})[-1][1]

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

    def _in_virtual_time(
        self, train: Callable[[Replica], Coroutine[Pending[Any], None, T]], *, tested: int | None = None
    ) -> list[T]:
        torch.set_num_threads(1)
        task = cast("Workload", _Prepared(workload(self.workload), tested))
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
        if self.slow != 1:
            speeds = [1.0] * (self.replicas - 1) + [self.slow]
            world = VirtualWorld(self.replicas, device=[DeviceProfile(forward_s=each) for each in speeds])
        shares = None
        if self.partition is not None:
            how: Partition = build("partition", self.partition, PARTITIONS)
            shares = how.split(task.datasets()[0], self.replicas, seed=self.seed)
        return world.run(
            [train(one) for one in replicas_in(world, task, training, self.parts, shares=shares)]
        )


class _Prepared:
    """A workload whose model keeps channels innermost: faster on these processors, and rounded otherwise.

    Args:
      task: the workload.
      tested: how many test samples; all when not given.
    """

    def __init__(self, task: Workload, tested: int | None) -> None:
        self._task, self._tested = task, tested

    def model(self, generator: torch.Generator) -> nn.Module:
        return self._task.model(generator).to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]

    def datasets(self) -> tuple[Dataset, Dataset]:
        train, test = self._task.datasets()
        return train, test if self._tested is None else Subset(test, torch.arange(len(test))[: self._tested])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


class Trials:
    """The trainings of a benchmark, stored in ``results/trials.jsonl``.

    Args:
      trainings: that are stored.
      quick: two steps of a quadratic, whose score is no accuracy, and nothing is stored.
    """

    def __init__(self, trainings: Trainings[Trial, float], *, quick: bool) -> None:
        self._trainings, self._quick = trainings, quick

    def accuracies(self, trials: Sequence[Trial]) -> list[float]:
        """Of several trainings, in percent."""
        if self._quick:
            tiny: dict[str, Any] = {
                "workload": "synthetic/quadratic",
                "replicas": 2,
                "steps": 2,
                "batch_size": 8,
            }
            return [replace(trial, **tiny).accuracy() for trial in trials]
        return self._trainings.accuracies(trials)

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
