"""Trains resnet20 on CIFAR-10 under DDP with one method as its hook.

torchrun ... -m benchmarks.compression_pays.accuracy METHOD SEED STEPS TESTED
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.common import torchrun
from benchmarks.common.first_steps import combined, digest, first_steps
from benchmarks.compression_pays.methods import METHODS, wrapped
from farflung.reducers import CodecReducer
from farflung.schedules import Synchronous
from farflung.seeding import derive, generator
from farflung.workloads import workload

WORKLOAD, PROCESSES, BATCH, LEARNING_RATE, MOMENTUM = "cifar10/resnet20", 4, 32, 0.05, 0.9
ALL, FEW = 10_000, 500
"""Test samples, and those that say whether scoring is what it was."""


@dataclass(frozen=True)
class Hooked:
    """A training on loopback with one method as DDP's hook.

    Args:
      method: by its name in tables.
      seed: of the model and the order of samples.
      steps: updates.
    """

    method: str
    seed: int
    steps: int

    @property
    def title(self) -> str:
        """Method and seed."""
        return f"{self.method}, seed {self.seed}"

    def first_steps(self) -> int:
        """Until everything that the method does has happened twice."""
        model = workload(WORKLOAD).model(generator(self.seed, "model"))
        return first_steps(model, Synchronous(), METHODS.get(self.method, CodecReducer()), self.steps)

    def digest(self, steps: int) -> str:
        """Of all processes after the first steps, and of their score."""
        said = sorted(self._run(steps, FEW), key=lambda one: int(one["rank"]))
        return combined(f"{one['digest']} {one['accuracy']!r}" for one in said)

    def accuracy(self) -> float:
        """On the test set at the end, in percent."""
        return float(self._run(self.steps, ALL)[0]["accuracy"])

    def _run(self, steps: int, tested: int) -> list[dict[str, Any]]:
        module = "benchmarks.compression_pays.accuracy"
        return torchrun(PROCESSES, module, self.method, str(self.seed), str(steps), str(tested))


def main() -> None:
    """Every process prints where its model ended, and the test accuracy of all in percent."""
    torch.set_num_threads(1)
    method, (seed, steps, tested) = sys.argv[1], map(int, sys.argv[2:5])
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    rank, size = dist.get_rank(), dist.get_world_size()
    task = workload(WORKLOAD)
    train, test = task.datasets()
    model = task.model(generator(seed, "model"))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    ddp, close = wrapped(method, model)
    torch.manual_seed(derive(seed, "samples", rank))  # of how they are shifted and mirrored
    order = torch.randperm(len(train), generator=generator(seed, "order"))
    for step in range(steps):
        places = torch.arange(BATCH) + (step * size + rank) * BATCH
        batch = train.take(order[places % len(order)], train=True)
        task.loss(ddp, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        mine = torch.arange(rank, tested, size)
        right = sum(
            (task.metric(model, test.take(ids, train=False)).sum() for ids in mine.split(250)),
            torch.zeros(()),
        )
    dist.all_reduce(right)
    said = {"rank": rank, "digest": digest(model), "accuracy": 100 * float(right) / tested}
    sys.stdout.write(json.dumps(said) + "\n")  # in one piece: all processes write to one pipe
    sys.stdout.flush()
    close()
    del ddp  # its own threads have to be gone before the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
