"""A small language model, sharded by FSDP2 over the processes of a site; sites train together by DiLoCo.

Two sites of two processes on one machine, each site in a terminal of its own:

FARFLUNG_SITE=0/2@127.0.0.1:29400 torchrun --standalone --nproc-per-node 2 examples/sites/train.py
FARFLUNG_SITE=1/2@127.0.0.1:29400 torchrun --standalone --nproc-per-node 2 examples/sites/train.py
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import farflung

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--recipe", default="diloco(sync_every=20)")
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--elastic", type=int, default=0, help="smallest number of sites that go on after a loss")
options = parser.parse_args()
TEXT = "the quick brown fox jumps over the lazy dog. " * 400
LETTERS = sorted(set(TEXT))
TOKENS = torch.tensor([LETTERS.index(letter) for letter in TEXT])


class Model(nn.Module):
    """Predicts the next letter of each place; returns the loss."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed = nn.Embedding(len(LETTERS), width)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(width, len(LETTERS))

    def forward(self, rows: Tensor) -> Tensor:
        x = self.embed(rows[:, :-1])
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), rows[:, 1:].flatten())


mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))  # the processes of this site
torch.manual_seed(0)
model = Model()
for block in model.blocks:
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

with farflung.attach(model, optimizer, options.recipe, site=mesh, elastic=options.elastic) as handle:
    share, processes = handle.share
    for step in range(options.steps):
        place, size = handle.members.index(handle.rank), handle.size  # of the sites that are present
        random = torch.Generator().manual_seed(step)
        starts = torch.randint(0, len(TOKENS) - 33, (size * processes * 8,), generator=random)
        starts = starts[place * processes + share :: size * processes]  # this process's rows of the batch
        loss = model(torch.stack([TOKENS[start : start + 33] for start in starts]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if share == 0 and (step + 1) % 20 == 0:
            print(f"site {handle.rank} of {handle.size}: step {step + 1}, loss {loss.item():.3f}", flush=True)

print(f"site {handle.rank}, process {share}: {handle.sent_nbytes / 1e6:.2f} MB sent to other sites")
dist.destroy_process_group()
