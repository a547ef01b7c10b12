"""Importance sampling under DistributedDataParallel, or alone: what a loop with a DataLoader changes is marked.

torchrun --standalone --nproc-per-node 2 examples/importance_in_ddp.py
python examples/importance_in_ddp.py --workers 2 --scored-by loss
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import farflung
from farflung.seeding import create_generator
from farflung.workloads import create_workload

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch-size", type=int, default=32)
parser.add_argument("--learning-rate", type=float, default=0.02)
parser.add_argument("--scored-by", choices=["loss", "gradient_bound"], default="gradient_bound")
parser.add_argument("--workers", type=int, default=0, help="of the loader")
parser.add_argument("--seed", type=int, default=0)
options = parser.parse_args()

torch.set_num_threads(1)
if "WORLD_SIZE" in os.environ:
    dist.init_process_group("gloo")
task = create_workload("fashion-mnist/cnn", data="packaged")
train, test = (data.take(torch.arange(len(data)), train=False) for data in task.load_datasets())
dataset = TensorDataset(train.inputs, train.targets)
model = task.build_model(create_generator(options.seed, "model"))
trained = DistributedDataParallel(model) if dist.is_initialized() else model
optimizer = torch.optim.SGD(model.parameters(), lr=options.learning_rate, momentum=0.9)

sampler = farflung.ImportanceSampler(  # instead of a DistributedSampler
    dataset, options.batch_size, scored_by=options.scored_by, seed=options.seed
)
loader = DataLoader(dataset, batch_sampler=sampler, num_workers=options.workers)


def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:  # one for each sample, instead of their mean
    inputs, targets = batch
    return F.cross_entropy(model(inputs), targets, reduction="none")


steps, weights = 0, torch.empty(0)
while steps < options.steps:
    for drawn, batch in sampler.iter_batches(loader, model, losses):  # instead of the loader itself
        drawn.reduce_losses(losses(trained, batch)).backward()  # instead of the mean's
        optimizer.step()
        optimizer.zero_grad()
        steps, weights = steps + 1, drawn.weights
        if steps == options.steps:
            break

with torch.no_grad():
    accuracy = float((model.eval()(test.inputs).argmax(dim=1) == test.targets).float().mean())
if not dist.is_initialized() or dist.get_rank() == 0:
    print(
        json.dumps(
            {
                "steps": steps,
                "accuracy": accuracy,
                "lowest_weight": float(weights.min()),
                "highest_weight": float(weights.max()),
            }
        )
    )

del trained  # DDP's destructor may wait forever for gloo's thread if it is the last to hold the group
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
