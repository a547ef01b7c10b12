"""Trainings of a small transformer: its loss on the last tenth of the text, the bytes sent until then, and when."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from benchmarks.common import Trainings
from benchmarks.common.worlds import replicas_in
from benchmarks.presets.methods import METHODS, parts_of
from farflung.calibration import forward_flops
from farflung.config import Training
from farflung.devices import DeviceProfile, device_profile
from farflung.network import network_profile
from farflung.replica import Replica
from farflung.runs.simulation import one_thread
from farflung.sim import VirtualWorld
from farflung.tasks import Pending
from farflung.types import Workload
from farflung.workloads import workload

__all__ = [
    "DEVICE",
    "NODES",
    "TRAININGS",
    "Curve",
    "Language",
    "canaries",
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

    def train(self) -> Curve:
        """Of the mean or anchor of the replicas where they differ; the last point with all that is under way merged."""
        due = sorted({max(1, round(share * self.steps)) for share in EVALUATED})

        async def train(replica: Replica) -> list[tuple[int, float, int, float]]:
            found = []
            for steps in due:
                while replica.step_done < steps:
                    await replica.step()
                if steps == self.steps:
                    await replica.flush()
                # A score delays no step, so it takes no time from what decides by the clock.
                score = await replica._evaluated()
                found.append((steps, score, replica.sent_nbytes, replica.runtime.now()))
            return [(steps, (await score).loss, sent, seconds) for steps, score, sent, seconds in found]

        of_replicas = self._in_virtual_time(train)
        return [
            (steps, loss if math.isfinite(loss) else math.inf, sum(one[2] for one in same), seconds)
            for same in zip(*of_replicas, strict=True)
            for steps, loss, _, seconds in same[:1]
        ]

    def _in_virtual_time(self, train: Callable[[Replica], Coroutine[Pending[Any], None, T]]) -> list[T]:
        task = workload(self.workload)
        world = world_on(self.network, task) if self.network else VirtualWorld(NODES)
        with one_thread():
            replicas = replicas_in(
                world,
                task,
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


def canaries(preset: str) -> tuple[str, ...]:
    """The cases of the battery that cover a preset."""
    return (f"preset {preset}",)


TRAININGS: Trainings[Language, Curve] = Trainings(
    Path(__file__).parent / "results" / "trainings.jsonl",
    Language,
    lambda training: canaries(training.preset),
)
