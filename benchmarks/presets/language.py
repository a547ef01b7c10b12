"""Trainings of a small transformer: its loss on the last tenth of the text, the bytes sent until then, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import torch

from benchmarks.common import Trainings
from benchmarks.common.first_steps import combined, digest, first_steps
from benchmarks.common.trainings import TRAINED
from benchmarks.common.worlds import replicas_in
from benchmarks.presets.methods import METHODS, parts_of
from farflung.config import Training
from farflung.data import Subset
from farflung.devices import DeviceProfile, device_profile
from farflung.network import network_profile
from farflung.recipes import recipe
from farflung.replica import Replica
from farflung.runs.simulation import one_thread
from farflung.runtime import VirtualWorld
from farflung.seeding import generator
from farflung.tasks import Pending
from farflung.timing import forward_flops
from farflung.types import Dataset, Workload
from farflung.workloads import workload

__all__ = [
    "DEVICE",
    "NODES",
    "TRAININGS",
    "Curve",
    "Language",
    "device_of",
    "settings",
    "world_on",
]

T = TypeVar("T")
Curve: TypeAlias = list[tuple[int, float, int, float]]
"""Steps; loss after them; bytes that all replicas had sent; seconds on the training's network, without one 0."""
NODES, DEVICE = 4, "cpu-core"
EVALUATED = (0.125, 0.25, 0.375, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 1.0)
"""After these shares of the steps; closer together where losses come near to their best."""
FEW = 64
"""Windows that say whether scoring is what it was."""


@dataclass(frozen=True)
class Language:
    """One training.

    Args:
      preset: its name.
      learning_rate: the highest, after the warm-up.
      network: between the replicas; without one messages take no time.
      steps: updates.
      workload: its name.
      seed: of everything.
    """

    preset: str
    learning_rate: float
    network: str = ""
    steps: int = 2000
    workload: str = "tinyshakespeare/gpt"
    seed: int = 0

    @property
    def title(self) -> str:
        """What differs between them."""
        where = f" on {self.network}" if self.network else ""
        return f"{self.preset}{where}, rate {self.learning_rate:g}, seed {self.seed}"

    def quickly(self) -> Language:
        """The same, of something small, until every preset has sent something."""
        return replace(self, steps=52, workload="synthetic/quadratic")

    def first_steps(self) -> int:
        """Until everything that the preset does has happened twice."""
        parts = recipe(self.preset).parts(self.seed)
        model = workload(self.workload).model(generator(self.seed, "model"))
        found = first_steps(model, parts.schedule, parts.reducer, self.steps)
        two_blocks = 2 * getattr(parts.schedule, "sync_every", 0) + 1  # of all fragments, and by the clock
        return min(self.steps, max(found, two_blocks))

    def digest(self, steps: int) -> str:
        """Of all replicas after the first steps, and again with loss and time once all that is under way is merged."""

        async def train(replica: Replica) -> str:
            for _ in range(steps):
                await replica.step()
            trained = digest(replica.model)
            await replica.flush()
            ended = repr(replica.runtime.now())
            return combined([trained, digest(replica.model), ended, repr((await replica.evaluate()).loss)])

        return combined(self._in_virtual_time(train, tested=FEW))

    def accuracy(self) -> Curve:
        """Of the mean or anchor of the replicas where they differ; the last point with all that is under way merged."""
        due = sorted({max(1, round(share * self.steps)) for share in EVALUATED})

        async def train(replica: Replica) -> list[tuple[int, float, int, float]]:
            found = []
            for steps in due:
                while replica.step_done < steps:
                    await replica.step()
                if steps == self.steps:
                    await replica.flush()
                # Nobody waits for a score, so it takes no time from what decides by the clock.
                score = await replica._evaluated()
                found.append((steps, score, replica.sent_nbytes, replica.runtime.now()))
            return [(steps, (await score).loss, sent, seconds) for steps, score, sent, seconds in found]

        of_replicas = self._in_virtual_time(train)
        return [
            (steps, loss if math.isfinite(loss) else math.inf, sum(one[2] for one in same), seconds)
            for same in zip(*of_replicas, strict=True)
            for steps, loss, _, seconds in same[:1]
        ]

    def _in_virtual_time(
        self, train: Callable[[Replica], Coroutine[Pending[Any], None, T]], *, tested: int | None = None
    ) -> list[T]:
        task = workload(self.workload)
        world = world_on(self.network, task) if self.network else VirtualWorld(NODES)
        with one_thread():
            replicas = replicas_in(
                world,
                task if tested is None else cast("Workload", _Shorter(task, tested)),
                settings(task, self.preset, self.steps, self.learning_rate, self.seed),
                parts_of(self.preset),
            )
            return world.run([train(replica) for replica in replicas])


def settings(task: Workload, preset: str, steps: int, learning_rate: float, seed: int = 0) -> Training:
    """The workload's own but for these, and for the optimizer where a preset needs another."""
    given = {
        "steps": steps,
        "learning_rate": learning_rate,
        "optimizer": METHODS[preset].optimizer,
        "on_nonfinite": "skip",
        "seed": seed,
    }
    return Training.resolve(task.defaults, given)


def world_on(network: str, task: Workload) -> VirtualWorld:
    """Replicas on a network by name."""
    return VirtualWorld(NODES, network=network_profile(network).for_nodes(NODES), device=device_of(task))


def device_of(task: Workload) -> DeviceProfile:
    """What each replica computes on."""
    return device_profile(DEVICE, forward_flops=forward_flops(task))


class _Shorter:
    """A workload with fewer test samples.

    Args:
      task: the workload.
      tested: how many.
    """

    def __init__(self, task: Workload, tested: int) -> None:
        self._task, self._tested = task, tested

    def datasets(self) -> tuple[Dataset, Dataset]:
        train, test = self._task.datasets()
        return train, Subset(test, torch.arange(len(test))[: self._tested])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)


TRAININGS: Trainings[Language, Curve] = Trainings(
    Path(__file__).parent / "results" / "trainings.jsonl",
    Language,
    [
        *TRAINED,
        "benchmarks/common/worlds.py",
        "benchmarks/presets/language.py",
        "benchmarks/presets/methods.py",
    ],
    minutes=0.2,
)
