"""Trains resnet20 on CIFAR-10 under DDP with one method as its hook.

torchrun ... -m benchmarks.compression_pays.accuracy METHOD SEED STEPS
"""

from __future__ import annotations

import json
import os
import sys

import torch
import torch.distributed as dist

from benchmarks.compression_pays.methods import wrapped
from farflung.seeding import generator
from farflung.workloads import workload

BATCH, LEARNING_RATE, MOMENTUM = 32, 0.05, 0.9


def main() -> None:
    """Rank 0 prints the test accuracy in percent."""
    torch.set_num_threads(1)
    method, seed, steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    rank, size = dist.get_rank(), dist.get_world_size()
    task = workload("cifar10/resnet20")
    train, test = task.datasets()
    model = task.model(generator(seed, "model"))
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    ddp, close = wrapped(method, model)
    order = torch.randperm(len(train), generator=generator(seed, "order"))
    for step in range(steps):
        places = torch.arange(BATCH) + (step * size + rank) * BATCH
        batch = train.take(order[places % len(order)], train=True)
        task.loss(ddp, batch).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        mine = torch.arange(rank, len(test), size)
        right = sum(
            (task.metric(model, test.take(ids, train=False)).sum() for ids in mine.split(250)),
            torch.zeros(()),
        )
    dist.all_reduce(right)
    if rank == 0:
        print(json.dumps({"accuracy": 100 * float(right) / len(test)}), flush=True)
    close()
    del ddp  # its own threads have to be gone before the group
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
