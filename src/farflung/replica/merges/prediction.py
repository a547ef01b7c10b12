"""Where the own gradients that are still under way would lead."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from farflung.errors import ConfigError
from farflung.replica.buckets import GradientBuckets

__all__ = ["check_predictable", "predictable", "predicted"]


def predictable(optimizer: torch.optim.Optimizer) -> bool:
    """Whether :func:`predicted` knows where an optimizer leads: plain SGD, with momentum and weight decay."""
    return isinstance(optimizer, torch.optim.SGD) and not any(
        group["nesterov"] or group["dampening"] for group in optimizer.param_groups
    )


def check_predictable(optimizer: torch.optim.Optimizer) -> None:
    """Refuses an optimizer that is not :func:`predictable`.

    Raises:
      ConfigError: it is not.
    """
    if not predictable(optimizer):
        raise ConfigError(
            "pipelined(predict=True) follows plain SGD, with momentum and weight decay: use --optimizer sgd, or "
            "pipelined(correction=...)"
        )


@contextmanager
def predicted(
    optimizer: torch.optim.Optimizer, buckets: GradientBuckets, missing: Sequence[Mapping[int, Tensor]]
) -> Iterator[None]:
    r"""Inside, the parameters are where SGD would come to by the own gradients in place of their means.

    .. math:: \hat v \leftarrow \mu \hat v + g + \lambda \hat w, \qquad \hat w \leftarrow \hat w - \eta \hat v

    Args:
      optimizer: of those that :func:`check_predictable` lets pass; its state stays as it is.
      buckets: of the model.
      missing: own gradients, oldest first, by bucket.
    """
    kept: list[tuple[nn.Parameter, Tensor]] = []
    rates = {p: group for group in optimizer.param_groups for p in group["params"]}
    with torch.no_grad():
        for index in missing[0] if missing else ():
            parameters = buckets.parameters(index)
            steps = [buckets.view(index, gradients[index]) for gradients in missing]
            for place, p in enumerate(parameters):
                kept.append((p, p.detach().clone()))
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
            for p, value in kept:
                p.copy_(value)
