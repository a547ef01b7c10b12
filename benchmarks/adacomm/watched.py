"""Trainings in virtual time whose training loss is looked at on their way."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn

from benchmarks.adacomm.links import COLLECTIVE, REPLICAS, device, links
from benchmarks.common.worlds import replicas_in
from farflung.config import Training
from farflung.data import Subset, cifar
from farflung.loop import Replica
from farflung.seeding import create_generator
from farflung.sim import VirtualWorld
from farflung.tasks import Pending
from farflung.types import Dataset, Workload
from farflung.workloads import Classification, create_workload, vgg

__all__ = ["HALVED", "SAMPLES", "Point", "Watched"]

T = TypeVar("T")
HALVED = "cifar10/vgg at 16 x 16"
SAMPLES = 2_000
"""Of the training set, the first ones; the same for all."""
FEW = 500
"""Of them, that say whether a loss is what it was."""


@dataclass(frozen=True)
class Point:
    """The training loss on the way.

    Args:
      steps: that were done.
      seconds: of virtual time that they took.
      loss: mean cross-entropy over :data:`FLOP_SAMPLES`, of the model that all replicas have after an exchange.
      block: steps since the exchange before.
    """

    steps: int
    seconds: float
    loss: float
    block: int


@dataclass(frozen=True)
class Watched:
    """A training on links of which an exchange takes ``ratio`` times as long as the computation of a step.

    Args:
      schedule: as text.
      workload: its name, or :data:`HALVED`.
      ratio: D/Y.
      learning_rate: of the first step.
      momentum: of SGD.
      milestones: steps at which the learning rate falls to a tenth.
      steps: updates.
      every: steps between two looks; each waits for the next exchange, before which there is no model that all have.
      batch_size: samples per replica and step.
      weight_decay: of SGD.
      seed: of everything.
    """

    schedule: str = "synchronous"
    workload: str = HALVED
    ratio: float = 4.0
    learning_rate: float = 0.1
    momentum: float = 0.0
    milestones: list[int] = field(default_factory=list)
    steps: int = 1500
    every: int = 50
    batch_size: int = 16
    weight_decay: float = 5e-4
    seed: int = 0

    @property
    def title(self) -> str:
        """What differs between them."""
        falling = f", falling at {self.milestones}" if self.milestones else ""
        return (
            f"{self.schedule}, D/Y {self.ratio:g}, rate {self.learning_rate:g}{falling}, "
            f"momentum {self.momentum:g}, seed {self.seed}"
        )

    def train(self) -> list[list[float]]:
        """The curve, as the numbers of its points: see :meth:`points`."""

        async def train(replica: Replica) -> list[list[float]]:
            curve: list[list[float]] = []
            before, due = 0, self.every
            for step in range(1, self.steps + 1):
                exchanged = (await replica.step()).stats is not None
                if exchanged and step >= due:
                    loss = (await replica.evaluate()).loss
                    curve.append([step, replica.runtime.read_clock(), loss, step - before])
                    due = (step // self.every + 1) * self.every
                if exchanged:
                    before = step
            return curve

        return self._in_virtual_time(train, looked_at=SAMPLES)[0]

    def points(self, found: list[list[float]]) -> list[Point]:
        """Of what :meth:`train` gave."""
        return [Point(int(steps), seconds, loss, int(block)) for steps, seconds, loss, block in found]

    def _in_virtual_time(
        self, train: Callable[[Replica], Coroutine[Pending[Any], None, T]], *, looked_at: int
    ) -> list[T]:
        torch.set_num_threads(1)
        falling = f"step(milestones={tuple(self.milestones)}, gamma=0.1)"
        training = Training(
            steps=self.steps,
            batch_size=self.batch_size,
            learning_rate=self.learning_rate,
            momentum=self.momentum,
            weight_decay=self.weight_decay,
            learning_rate_schedule=falling if self.milestones else "constant",
            on_nonfinite="skip",
            seed=self.seed,
        )
        nbytes = sum(p.nbytes for p in self._model().parameters())
        world = VirtualWorld(REPLICAS, device=device(self.batch_size), network=links(self.ratio, nbytes))
        task = cast("Workload", _LookedAt(_workload(self.workload), looked_at))
        parts = {"collective": COLLECTIVE, "schedule": self.schedule}
        return world.run([train(one) for one in replicas_in(world, task, training, parts)])

    def _model(self) -> nn.Module:
        return _workload(self.workload).build_model(create_generator(self.seed, "model"))


class _LookedAt:
    """A workload that is evaluated on a part of its training set.

    Args:
      task: the workload.
      samples: how many, the first ones.
    """

    def __init__(self, task: Workload, samples: int) -> None:
        self._task, self._samples = task, samples

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        train, _ = self._task.load_datasets()
        return train, Subset(train, torch.arange(min(self._samples, len(train))))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


@functools.cache
def _workload(name: str) -> Workload:
    if name != HALVED:
        return create_workload(name)
    return Classification(HALVED, _network, functools.partial(cifar.load, cifar.CIFAR10), {})


def _network() -> nn.Module:
    """That of ``cifar10/vgg``; it sees pictures of half the width and height, each pixel the mean of four."""
    made = nn.Sequential(nn.AvgPool2d(2), vgg((3, 16, 16), (32, None, 64, None, 128, None), 128, 10))
    return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
