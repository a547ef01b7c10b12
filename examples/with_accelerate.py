"""A training loop under Accelerate, with farflung in place of its wrapper: everything but the model is prepared.

torchrun --standalone --nproc-per-node 2 examples/with_accelerate.py
"""

from __future__ import annotations

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import farflung
from farflung.recipes import parse_recipe

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--codec", default="int8")
parser.add_argument("--passes", type=int, default=2)
parser.add_argument("--accumulate", type=int, default=1)
options = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(256, 8)
samples = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
model = nn.Linear(8, 1)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=options.accumulate)
optimizer, loader = accelerator.prepare(
    torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(samples, batch_size=8, shuffle=True)
)
model.to(accelerator.device)
with farflung.attach(
    model, optimizer, parse_recipe("synchronous").with_components(codec=options.codec)
) as handle:
    for _ in range(options.passes):
        for batch, targets in loader:
            with accelerator.accumulate(model):
                optimizer.zero_grad()
                accelerator.backward(nn.functional.mse_loss(model(batch), targets))
                optimizer.step()
    accelerator.print(
        f"{handle.step} exchanges, loss {nn.functional.mse_loss(model(inputs), samples.tensors[1]).item():.2g}"
    )
