"""How much arithmetic a workload's model takes."""

from __future__ import annotations

import warnings

import torch
from torch.utils.flop_counter import FlopCounterMode

from farflung.seeding import generator
from farflung.types import Workload

__all__ = ["forward_flops"]


def forward_flops(task: Workload) -> float:
    """Float32 operations of a forward pass, per sample, a multiplication and an addition being two.

    Counted by torch for products of matrices and convolutions; at least two for each parameter, which covers models
    that have neither.
    """
    model = task.model(generator(0, "flops"))
    batch = task.datasets()[0].take(torch.arange(1), train=False)
    counter = FlopCounterMode(display=False)
    model.eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # changing the flags of oneDNN warns of another device's
        # Without oneDNN a recurrent layer is made of products, which can be counted.
        with torch.backends.mkldnn.flags(enabled=False), torch.no_grad(), counter:
            task.loss(model, batch)
    least = 2 * sum(parameter.numel() for parameter in model.parameters())
    return float(max(counter.get_total_flops(), least))
