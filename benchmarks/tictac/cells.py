"""What a step takes in virtual time, of one model on one network by one collective."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch

from benchmarks.common.worlds import replicas_in
from benchmarks.tictac.models import BATCH_SIZE, MODELS, chain
from farflung.config import Training
from farflung.loop import Replica
from farflung.network import Link, NetworkProfile
from farflung.schedules import Priority
from farflung.sim import VirtualWorld
from farflung.types import ForwardTrace, Schedule, State, SyncUnit

__all__ = ["REPLICAS", "Cell", "RandomOrder", "exchange_s", "gain", "step_s"]

REPLICAS = 4
BANDWIDTH_BPS = 20e6
WARM_UP, STEPS = 3, 9
NO_TIME_S = 1e-9


@dataclass(frozen=True)
class RandomOrder(Priority):
    """No barrier either, and buckets leave in an order that is drawn: the baseline of the paper.

    Args:
      seed: that draws it.
    """

    seed: int = 0

    def record_trace(self, state: State, units: Sequence[SyncUnit], trace: ForwardTrace) -> State:
        random = torch.Generator().manual_seed(self.seed)
        return {"priorities": torch.randperm(len(units), generator=random).tolist()}


@dataclass(frozen=True)
class Cell:
    """What is measured.

    Args:
      model: a name in :data:`benchmarks.tictac.models.MODELS`, or ``chain of N``.
      collective: that sums.
      latency_s: of each link, one way.
      ratio: T over C: the exchange of all gradients over computing a step.
    """

    model: str
    collective: str = "ring"
    latency_s: float = 0.002
    ratio: float = 1.0


@cache
def exchange_s(cell: Cell, bucket_nbytes: int = 1) -> float:
    """T: a step that computes nothing, of synchronous SGD."""
    return _run(cell, "synchronous", bucket_nbytes, NO_TIME_S)


@cache
def step_s(cell: Cell, schedule: str | Schedule, bucket_nbytes: int = 1) -> float:
    """Of a recipe; each layer is a bucket when not told otherwise. C is T, in such buckets, over the ratio."""
    return _run(cell, schedule, bucket_nbytes, exchange_s(replace(cell, ratio=1.0)) / cell.ratio)


def gain(cell: Cell, schedule: str | Schedule = "priority") -> float:
    """Synchronous SGD's step, in the same buckets, over that of a schedule."""
    return step_s(cell, "synchronous") / step_s(cell, schedule)


def _run(cell: Cell, schedule: str | Schedule, bucket_nbytes: int, compute_s: float) -> float:
    count = cell.model.removeprefix("chain of ")
    model = chain(int(count)) if count != cell.model else MODELS[cell.model]
    network = NetworkProfile.create_uniform(Link(cell.latency_s, BANDWIDTH_BPS), REPLICAS)
    world = VirtualWorld(REPLICAS, device=model.device(compute_s), network=network)
    training = Training(steps=STEPS, batch_size=BATCH_SIZE, learning_rate=0.01)
    parts: dict[str, Any] = {
        "collective": cell.collective,
        "schedule": schedule,
        "bucket_nbytes": bucket_nbytes,
    }
    replicas = replicas_in(world, model.workload(), training, parts)
    ends_s: list[float] = []

    async def train(replica: Replica) -> None:
        for _ in range(STEPS):
            await replica.step()
            if replica is replicas[0]:
                ends_s.append(world.clock.time())

    world.run([train(replica) for replica in replicas])
    return statistics.fmean(after - before for before, after in pairwise(ends_s[WARM_UP:]))
