"""Times steps with each method beside DDP's own, on whatever network it is started on.

torchrun ... -m benchmarks.compression_pays.worker BATCH ROUNDS STEPS METHOD ...
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F

from benchmarks.compression_pays.methods import AUTO, DDP, wrapped
from farflung.ddp import DECIDED_AFTER
from farflung.seeding import generator
from farflung.workloads import workload

WARM_UP = 3
"""Steps in which buckets are laid out and connections find their rate."""
MORE = 5
"""How many times as many blocks that one has: its goal leaves 2 %, less than blocks of one method differ by."""


def main() -> None:
    """Rank 0 prints one JSON object for each method: seconds of a step in each block, DDP's and its own."""
    torch.set_num_threads(1)
    (batch, rounds, steps), methods = map(int, sys.argv[1:4]), sys.argv[4:]
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    plain = Training(DDP, batch)
    plain.block(WARM_UP)
    for method in methods:
        training = Training(method, batch)
        training.block(DECIDED_AFTER + 1 if method == AUTO else WARM_UP)
        theirs, own = [], []
        for _ in range(rounds * (MORE if method == AUTO else 1)):
            theirs.append(plain.block(steps))
            own.append(training.block(steps))
        training.close()
        if dist.get_rank() == 0:
            print(json.dumps({"method": method, "ddp_s": theirs, "step_s": own}), flush=True)
    del plain, training  # DDP's own threads have to be gone before the group
    dist.destroy_process_group()


class Training:
    """resnet20 under DDP with one method as its hook, on random pictures.

    Args:
      method: its name.
      batch: samples of each step and rank.
    """

    def __init__(self, method: str, batch: int) -> None:
        self._ddp, self.close = wrapped(method, workload("cifar10/resnet20").model(generator(0, "model")))
        self._optimizer = torch.optim.SGD(self._ddp.parameters(), lr=0.01, momentum=0.9)
        own = generator(0, "data", dist.get_rank())
        self._inputs = torch.randn(batch, 3, 32, 32, generator=own)
        self._targets = torch.randint(10, (batch,), generator=own)

    def block(self, steps: int) -> float:
        """The median of so many steps, which all ranks begin together; in seconds."""
        times = []
        for _ in range(steps):
            dist.barrier()
            begin = time.perf_counter()
            F.cross_entropy(self._ddp(self._inputs), self._targets).backward()
            self._optimizer.step()
            self._optimizer.zero_grad()
            times.append(time.perf_counter() - begin)
        dist.barrier()
        return statistics.median(times)


if __name__ == "__main__":
    main()
