"""How many operations a workload takes."""

from __future__ import annotations

import warnings

import torch
from torch.utils.flop_counter import FlopCounterMode

from farflung.seeding import RandomState, derive, generator
from farflung.types import Workload

__all__ = ["forward_flops"]

SAMPLES = 8


def forward_flops(work: Workload, seed: int = 0) -> float:
    """Float operations of a forward pass, per sample: the matrix products and convolutions, two for each product.

    For :func:`farflung.devices.device_profile`, which knows devices by their operations per second.

    Args:
      work: what is to be trained.
      seed: of the model's weights and of dropout.
    """
    with RandomState.scope():
        RandomState(derive(seed, "replica", 0)).install()
        train, _ = work.datasets()
        count = min(SAMPLES, len(train))
        batch = train.take(torch.arange(count), train=True)
        model = work.model(generator(seed, "model"))
        # oneDNN's recurrent layers are one operation that nobody can look into; switching it warns of Intel's GPUs.
        with warnings.catch_warnings(), torch.no_grad(), FlopCounterMode(display=False) as counter:
            warnings.simplefilter("ignore", UserWarning)
            with torch.backends.mkldnn.flags(enabled=False):
                work.loss(model, batch)
        return float(counter.get_total_flops()) / count
