"""Times DistributedDataParallel with each hook, on whatever network it is started on.

torchrun ... -m benchmarks.compression_pays.worker STEPS [METHOD ...]
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import farflung
from benchmarks.compression_pays.methods import DDP, FP16_HOOK, METHODS, POWERSGD_HOOK
from farflung.seeding import generator
from farflung.workloads import workload

BATCH, WARM_UP = 32, 4


def main() -> None:
    """Rank 0 prints one JSON object for each method: the median step and its quartiles, in seconds."""
    torch.set_num_threads(1)
    steps, wanted = int(sys.argv[1]), sys.argv[2:] or [DDP, FP16_HOOK, POWERSGD_HOOK, *METHODS]
    dist.init_process_group("gloo", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"]))
    for method in wanted:
        low, middle, high = _step_s(method, steps)
        if dist.get_rank() == 0:
            print(json.dumps({"method": method, "step_s": middle, "spread": [low, high]}), flush=True)
    dist.destroy_process_group()


def _step_s(method: str, steps: int) -> list[float]:
    # PyTorch's PowerSGD takes several all-reduces for a bucket; with two buckets gloo mixes them up and aborts.
    one_bucket = {"bucket_cap_mb": 25} if method == POWERSGD_HOOK else {}
    model = DistributedDataParallel(workload("cifar10/resnet20").model(generator(0, "model")), **one_bucket)  # type: ignore[arg-type]
    close = _hook(method, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    own = generator(0, "data", dist.get_rank())
    inputs, targets = torch.randn(BATCH, 3, 32, 32, generator=own), torch.randint(10, (BATCH,), generator=own)
    times = []
    for step in range(WARM_UP + steps):
        dist.barrier()
        begin = time.perf_counter()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= WARM_UP:
            times.append(time.perf_counter() - begin)
    dist.barrier()
    close()
    return statistics.quantiles(times, n=4) if len(times) > 1 else times * 3


def _hook(method: str, model: DistributedDataParallel) -> Callable[[], None]:
    """Registers it; what to call at the end."""
    if method == FP16_HOOK:
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif method == POWERSGD_HOOK:
        state: Any = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    elif method != DDP:
        ours, hook = farflung.ddp_hook(METHODS[method])
        model.register_comm_hook(ours, hook)
        return ours.close
    return lambda: None


if __name__ == "__main__":
    main()
