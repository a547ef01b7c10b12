"""Builds a model whose initial weights depend on a generator alone."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

__all__ = ["build"]


def build(network: Callable[[], nn.Module], generator: torch.Generator) -> nn.Module:
    """``network()`` on the CPU, under a seed drawn from ``generator``; torch's global random state is put back.

    PyTorch's layers initialise themselves from the global state, so it is lent for the duration: no other thread
    may draw from it meanwhile.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    before = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(seed)
        with torch.device("cpu"):
            return network()
    finally:
        torch.set_rng_state(before)
