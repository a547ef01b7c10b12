"""Trainings in virtual time whose accuracy and training loss are looked at on their way."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch
from torch import Tensor, nn

from benchmarks.common import Trainings
from benchmarks.common.worlds import replicas_in
from benchmarks.mercury.applications import (
    APPLICATIONS,
    COLLECTIVE,
    QUADRATIC,
    REPLICAS,
    Application,
    workload_of,
)
from benchmarks.workloads.halved import some, with_tail
from farflung.config import Training
from farflung.data import PARTITIONS, Partition, Subset
from farflung.loop import Replica
from farflung.loop.evaluation import Score, evaluate
from farflung.runs.simulation import limit_to_one_thread
from farflung.sampling.scoring import score_batch
from farflung.seeding import create_generator
from farflung.sim import VirtualWorld
from farflung.spec import build
from farflung.tasks import Pending
from farflung.types import Dataset, SampleIds, Workload

__all__ = ["CANARIES", "SEEN", "SHARES", "TRAININGS", "Found", "Moved", "Point", "Watched"]

T = TypeVar("T")
Found: TypeAlias = dict[str, list[list[float]]]
"""What a training came to, as JSON: see :meth:`Watched.points` and :meth:`Watched.moved`."""
SEEN = 2_000
"""Training samples, the same for all trainings of an application, whose loss is looked at."""
LATER = (1, 10)
"""Steps until ranks are looked at again."""
SHARES = (0.05, 0.1)
"""Of all ranks, that a sample may have moved."""


@dataclass(frozen=True)
class Point:
    """What the model was like on the way.

    Args:
      steps: that were done.
      seconds: of virtual time that they took.
      accuracy: on the test set, in percent.
      loss: mean cross-entropy over :data:`SEEN` training samples.
      train_accuracy: on those, in percent.
      scoring: seconds that the first replica has scored until then.
    """

    steps: int
    seconds: float
    accuracy: float
    loss: float
    train_accuracy: float
    scoring: float


@dataclass(frozen=True)
class Moved:
    """How far ranks by importance have moved.

    Args:
      since: steps that were done when samples were ranked.
      steps: from then on.
      shares: of the samples, by how little they moved: less than each of :data:`SHARES` of all ranks.
    """

    since: int
    steps: int
    shares: tuple[float, ...]


@dataclass(frozen=True)
class Watched:
    """One training.

    Args:
      application: see :data:`benchmarks.mercury.applications.APPLICATIONS`.
      parts: members of the recipe; gradients go around a ring where these say nothing else.
      mbps: of the paper's links; what it takes is scaled with the model.
      learning_rate: of Adam, constant.
      steps: updates.
      replicas: how many.
      partition: how the training set is split.
      samples: of the training set, at random; 0: all.
      tail: samples of the last class over those of the first, classes between falling geometrically; 1: all.
      every: steps between two looks; each waits for the next exchange, before which there is no model that all have.
      ranked: steps after which the samples that are looked at are ranked by importance, and again :data:`LATER`.
      seed: of everything.
    """

    application: str
    parts: dict[str, str] = field(default_factory=dict)
    mbps: float = 10
    learning_rate: float = 0.004
    steps: int = 2000
    replicas: int = REPLICAS
    partition: str = "iid"
    samples: int = 0
    tail: float = 1.0
    every: int = 50
    ranked: list[int] = field(default_factory=list)
    seed: int = 0

    @property
    def title(self) -> str:
        """What differs between them."""
        parts = ", ".join(self.parts.values()) or "uniform"
        tail = "" if self.tail == 1 else f" with a tail of {self.tail:g}"
        return (
            f"{self.application}{tail}, {parts}, {self.mbps:g} Mbit/s, {self.replicas} replicas, {self.partition}, "
            f"{self.steps} steps at rate {self.learning_rate:g}, seed {self.seed}"
        )

    def quickly(self) -> Watched:
        """The same, of something small without a convolution."""
        parts = {name: text for name, text in self.parts.items() if name != "reducer"}
        small: dict[str, Any] = {
            "steps": 36,
            "every": 12,
            "replicas": 2,
            "partition": "iid",
            "samples": 0,
            "tail": 1.0,
        }
        ranked = [5] if self.ranked else []
        return replace(self, application=QUADRATIC, parts=parts, ranked=ranked, **small)

    @property
    def what(self) -> Application:
        """Its data set and models."""
        return APPLICATIONS[self.application]

    def train(self) -> Found:
        """``curve``: the numbers of its points; ``moved``: those of ranks."""

        async def train(replica: Replica) -> Found:
            looks, due = [], self.every
            ranks = _Ranks(replica, self.ranked, _seen(task, SEEN))
            for step in range(1, self.steps + 1):
                exchanged = (await replica.step()).stats is not None
                ranks.after(step)
                if exchanged and step >= due:
                    looks.append(self._look(replica, task))
                    due = (step // self.every + 1) * self.every
            for look in looks:
                await look.through()
            return {"curve": [look.numbers() for look in looks], "moved": ranks.found}

        task = self._task()
        return self._in_virtual_time(task, train)[0]

    def points(self, found: Found) -> list[Point]:
        """The curve of what :meth:`train` gave."""
        return [Point(int(steps), *others) for steps, *others in found["curve"]]

    def moved(self, found: Found) -> list[Moved]:
        """The ranks of what :meth:`train` gave."""
        return [Moved(int(since), int(steps), tuple(shares)) for since, steps, *shares in found["moved"]]

    def _look(self, replica: Replica, task: Workload) -> _Look:
        """Evaluates the model as it is. No step waits for the score, so the clock does not count it."""
        test = task.load_datasets()[1]
        runtime = replica.runtime.untimed
        assert runtime is not None
        test_score, train_score = (
            runtime.launch(
                evaluate(
                    runtime,
                    task,
                    replica.model,
                    data,
                    2 * replica.completed_steps + nth,  # no exchange comes twice
                    consensus=replica.engine.get_consensus_parameters(),
                    is_concurrent=True,
                    seed=self.seed,
                    device=replica.device,
                )
            )
            for nth, data in enumerate((test, _seen(task, SEEN)))
        )
        return _Look(
            replica.completed_steps,
            replica.runtime.read_clock(),
            replica.time_s.scoring,
            test_score,
            train_score,
        )

    def _in_virtual_time(
        self, task: Workload, train: Callable[[Replica], Coroutine[Pending[Any], None, T]]
    ) -> list[T]:
        training = Training(
            steps=self.steps,
            batch_size=self.what.batch_size,
            learning_rate=self.learning_rate,
            optimizer="adam",
            on_nonfinite="skip",
            seed=self.seed,
        )
        nbytes = sum(p.nbytes for p in self._model().parameters())
        links = self.what.links(self.mbps, nbytes, self.replicas)
        how: Partition = build("partition", self.partition, PARTITIONS)
        with limit_to_one_thread():
            world = VirtualWorld(self.replicas, device=self.what.device, network=links)
            shares = how.split(task.load_datasets()[0], self.replicas, seed=self.seed)
            return world.run(
                [train(one) for one in replicas_in(world, task, training, self._members, shares=shares)]
            )

    @property
    def _members(self) -> dict[str, str]:
        return {"collective": COLLECTIVE, **self.parts}

    def _model(self) -> nn.Module:
        return workload_of(self.application).build_model(create_generator(self.seed, "model"))

    def _task(self) -> Workload:
        task = workload_of(self.application)
        train = task.load_datasets()[0]
        if self.samples:
            return cast("Workload", _Fewer(task, some(len(train), self.samples, "fewer")))
        return task if self.tail == 1 else cast("Workload", _Fewer(task, with_tail(train, self.tail)))


@dataclass(frozen=True, slots=True)
class _Look:
    """An evaluation that has begun."""

    steps: int
    seconds: float
    scoring: float
    tested: Pending[Score]
    trained: Pending[Score]

    async def through(self) -> None:
        """Waits for it."""
        await self.tested
        await self.trained

    def numbers(self) -> list[float]:
        """Of a :class:`Point`, in their order."""
        test, train = self.tested.result(), self.trained.result()
        loss = train.loss if math.isfinite(train.loss) else math.inf
        return [self.steps, self.seconds, 100 * test.metric, loss, 100 * train.metric, self.scoring]


class _Ranks:
    """How ranks by importance move under the first replica's model.

    Args:
      replica: whose model.
      since: steps after which samples are ranked.
      data: the samples.
    """

    def __init__(self, replica: Replica, since: Sequence[int], data: Dataset) -> None:
        self._replica, self._data = replica, data
        self._since = since if replica.runtime.comm.rank == 0 else ()
        self._before: dict[int, Tensor] = {}
        self.found: list[list[float]] = []

    def after(self, step: int) -> None:
        """Ranks where that is due."""
        earlier = [step - later for later in LATER if step - later in self._before]
        if step not in self._since and not earlier:
            return
        ranks = self._ranked()
        for since in earlier:
            moved = (ranks - self._before[since]).abs() / len(ranks)
            shares = [float((moved < share).double().mean()) for share in SHARES]
            self.found.append([since, step - since, *shares])
        if step in self._since:
            self._before[step] = ranks

    def _ranked(self) -> Tensor:
        batch = self._data.take(torch.arange(len(self._data)), train=False)
        scores = score_batch(self._replica.workload, self._replica.model, batch, "loss")
        return scores.argsort(stable=True).argsort()


class _Fewer:
    """A workload with fewer training samples.

    Args:
      task: the workload.
      ids: those that stay.
    """

    def __init__(self, task: Workload, ids: SampleIds) -> None:
        self._task = task
        train, self._test = task.load_datasets()
        self._train = Subset(train, ids)

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        return self._train, self._test

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


def _seen(task: Workload, count: int) -> Dataset:
    """The training samples that are looked at."""
    train = task.load_datasets()[0]
    return Subset(train, some(len(train), count, "seen"))


CANARIES = ("preset mercury", "preset synchronous", "preset adacomm")
TRAININGS: Trainings[Watched, Found] = Trainings(
    Path(__file__).parent / "results" / "trainings.jsonl",
    Watched,
    lambda training: CANARIES,
)
