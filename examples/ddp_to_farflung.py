"""The same training loop under DistributedDataParallel and under farflung: what changes is marked.

torchrun --standalone --nproc-per-node 2 examples/ddp_to_farflung.py --how ddp
torchrun --standalone --nproc-per-node 2 examples/ddp_to_farflung.py --how farflung
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import farflung
from farflung.seeding import RandomState, create_generator, derive_seed
from farflung.workloads import create_workload

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--how", choices=["ddp", "farflung"], default="farflung")
parser.add_argument("--workload", default="fashion-mnist/cnn")
parser.add_argument("--recipe", default="synchronous", help="for farflung")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--learning-rate", type=float, default=0.05)
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
torch.set_num_threads(1)
task = create_workload(options.workload)
train, test = task.load_datasets()
model = task.build_model(create_generator(options.seed, "model"))
RandomState(derive_seed(options.seed, "replica", rank)).install()
order = torch.randperm(len(train), generator=create_generator(options.seed, "order"))
optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9, weight_decay=1e-4)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)

evaluating: Callable[[], AbstractContextManager[Any]] = nullcontext
if options.how == "ddp":
    dist.init_process_group("gloo")
    trained: torch.nn.Module = DistributedDataParallel(model)
else:
    handle = farflung.attach(
        model, optimizer, options.recipe
    )  # instead of init_process_group and the wrapper
    trained = model
    evaluating = handle.use_averaged_model  # running statistics are averaged for the evaluation

for step in range(options.steps):
    places = torch.arange(options.batch_size) + (step * size + rank) * options.batch_size
    batch = train.take(order[places % len(order)], train=True)
    task.compute_losses(trained, batch).mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()

with evaluating(), torch.no_grad():
    model.eval()
    if rank == 0:
        parts = torch.arange(len(test)).split(256)
        right = sum(float(task.compute_metrics(model, test.take(ids, train=False)).sum()) for ids in parts)
        print(json.dumps({"how": options.how, "seed": options.seed, "accuracy": right / len(test)}))

if options.how == "ddp":
    dist.barrier()
    del trained  # DDP's destructor may wait forever for gloo's thread if it is the last to hold the group
    dist.destroy_process_group()
else:
    handle.finish()
