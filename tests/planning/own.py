"""Workloads and loops that a plan refuses."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from farflung import TorchWorkload

DATA = TensorDataset(torch.randn(64, 3), torch.randint(2, (64,)))


def build_random_width() -> nn.Module:
    return nn.Linear(3, int(torch.randint(2, 100, ())))


random_width = TorchWorkload(build_random_width, DATA, DATA, nn.functional.cross_entropy)
