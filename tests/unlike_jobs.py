"""What the workers of :mod:`tests.pool` do where ranks differ that should not."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import farflung
from farflung.errors import ProtocolError


def attaches(rank: int, size: int, store: dist.Store, *, what: str) -> str:
    """What ``attach`` says where rank 1 has another ``what`` than rank 0."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    unlike = what if rank == 1 else ""
    model = nn.Linear(*((2, 3) if unlike == "shape" else (3, 2)), bias=False)
    rate = 0.2 if unlike == "rate" else 0.1
    made: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    if unlike == "optimizer":
        made = torch.optim.Adam(model.parameters(), lr=rate)
    try:
        farflung.attach(model, made, store=store).finish()
    except ProtocolError as error:
        return str(error)
    return "nothing"
