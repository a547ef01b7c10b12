"""Weight prediction: gradients are computed at the parameters to which those in flight lead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor, nn
from typing_extensions import override

from farflung.engine.buckets import GradientBuckets
from farflung.engine.engine import Engine
from farflung.engine.extension import Extension

__all__ = ["WeightPrediction", "predict_weights"]


class WeightPrediction(Extension):
    """Extension that computes gradients at the parameters to which the rank's own gradients in flight lead.

    Args:
      engine: Engine with the exchanges in flight.
      buckets: Buckets of the model.
      optimizer: Optimizer accepted by :func:`farflung.moments.is_predictable`.
    """

    def __init__(self, engine: Engine, buckets: GradientBuckets, optimizer: torch.optim.Optimizer) -> None:
        self._engine, self._buckets, self._optimizer = engine, buckets, optimizer

    @override
    def compute_context(self, step: int) -> AbstractContextManager[object]:
        gradients: dict[int, dict[int, Tensor]] = {}
        for flight in self._engine.flights:
            for index, saved in flight.saved.items():
                gradients.setdefault(flight.step, {})[index] = saved["contribution"]
        return predict_weights(self._optimizer, self._buckets, list(gradients.values()))


@contextmanager
def predict_weights(
    optimizer: torch.optim.Optimizer,
    buckets: GradientBuckets,
    local_gradients: Sequence[Mapping[int, Tensor]],
) -> Iterator[None]:
    r"""Predicts parameters inside the context, by SGD on the local gradients in place of their means.

    .. math:: \hat v \leftarrow \mu \hat v + g + \lambda \hat w, \qquad \hat w \leftarrow \hat w - \eta \hat v

    Args:
      optimizer: Optimizer, whose state is not modified.
      buckets: Buckets of the model.
      local_gradients: Gradients of this rank by bucket, oldest first.
    """
    originals: list[tuple[nn.Parameter, Tensor]] = []
    rates = {p: group for group in optimizer.param_groups for p in group["params"]}
    with torch.no_grad():
        for index in local_gradients[0] if local_gradients else ():
            bucket = buckets[index]
            parameters = bucket.parameters
            steps = [bucket.view(gradients[index]) for gradients in local_gradients]
            for place, p in enumerate(parameters):
                originals.append((p, p.detach().clone()))
                group = rates[p]
                buffer = optimizer.state[p].get("momentum_buffer") if p in optimizer.state else None
                speed = torch.zeros_like(p) if buffer is None else buffer.clone()
                for gradients in steps:
                    speed.mul_(group["momentum"]).add_(gradients[place])
                    speed.add_(p, alpha=group["weight_decay"])
                    p.sub_(speed, alpha=group["lr"])
    try:
        yield
    finally:
        with torch.no_grad():
            for p, value in originals:
                p.copy_(value)
