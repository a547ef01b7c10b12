"""A training loop that resumes bit for bit from its checkpoint, with exchanges still in flight.

torchrun --standalone --nproc-per-node 2 examples/attach_checkpoint.py --folder kept --steps 50
torchrun --standalone --nproc-per-node 2 examples/attach_checkpoint.py --folder kept --steps 50  # the next 50
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import nn

import farflung
from farflung.loop.optimizers import get_optimizer_state, load_optimizer_state
from farflung.state_trees import load_tree, save_tree

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--schedule", default="delayed(delay=2)")
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--folder", type=Path, required=True)
options = parser.parse_args()

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

with farflung.attach(model, optimizer, farflung.Recipe(schedule=options.schedule)) as handle:
    # Parameters, momentum, running statistics and residuals differ between replicas: one file for each rank.
    file = options.folder / f"rank-{handle.rank}.safetensors"
    if file.exists():
        kept = load_tree(file)
        model.load_state_dict(kept["model"])
        load_optimizer_state(optimizer, kept["optimizer"])
        handle.load_state_dict(kept["handle"])

    for step in range(handle.step, handle.step + options.steps):
        random = torch.Generator().manual_seed(step * handle.size + handle.rank)  # this replica's samples
        inputs = torch.randn(32, 8, generator=random)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), inputs.sum(dim=1, keepdim=True)).backward()
        optimizer.step()

    file.parent.mkdir(parents=True, exist_ok=True)
    save_tree(  # before finish(), which merges exchanges in flight
        file,
        {
            "model": dict(model.state_dict()),
            "optimizer": get_optimizer_state(optimizer),
            "handle": handle.state_dict(),
        },
    )

print(
    f"rank {handle.rank}: step {handle.step}, {handle.sent_nbytes} bytes sent, waited {handle.waited_s:.2f} s"
)
