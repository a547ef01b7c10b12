"""What a step of training holds at its peak, by batch size and optimizer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.scadles.streamed import NETS
from farflung.optimizers import OPTIMIZERS as KNOWN

__all__ = ["OPTIMIZERS", "memory"]

OPTIMIZERS = ("sgd", "lars", "adam", "adamw")
PIXELS = (3, 32, 32)


def memory(net: str, batch: int, optimizer: str) -> dict[str, Any]:
    """Bytes of weights, their gradients, the optimizer's state, and what the forward pass keeps for the backward pass.

    What is kept is counted once for each storage, weights left out; the optimizer has taken a step with momentum 0.9.
    """
    model = NETS[net].network()
    weights = list(model.parameters())
    stored = {one.untyped_storage().data_ptr() for one in weights}
    kept: dict[int, int] = {}
    held: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in stored:
            kept[storage.data_ptr()] = storage.nbytes()
            held.append(tensor)
        return tensor

    inputs, targets = torch.zeros(batch, *PIXELS), torch.zeros(batch, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = F.cross_entropy(model(inputs), targets)
    loss.backward()
    made = KNOWN[optimizer]().make(weights, learning_rate=0.1, momentum=0.9, weight_decay=1e-4)
    made.step()
    state = [
        one
        for values in made.state.values()
        for one in values.values()
        if isinstance(one, Tensor) and one.dim()
    ]
    return {
        "batch": batch,
        "optimizer": optimizer,
        "weights": sum(one.nbytes for one in weights),
        "gradients": sum(one.grad.nbytes for one in weights if one.grad is not None),
        "state": sum(one.nbytes for one in state),
        "activations": sum(kept.values()),
    }
