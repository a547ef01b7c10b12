"""Weighted means: numerators and the sum of weights travel together, and the division comes last."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from farflung.types import Channel, CodingCost, Contribution, Reduced

__all__ = ["divisor", "mean_of", "numerator", "reduced", "side_of"]


def numerator(channel: Channel, own: Contribution) -> Tensor:
    """Weight times tensor, in the tensor's own memory."""
    return own.tensor if own.weight == 1.0 else _scaled(channel, own.tensor.mul_, own.tensor, own.weight)


def side_of(own: Contribution) -> Tensor:
    """What is summed beside the tensor: the weight, then the rider."""
    return torch.cat((torch.tensor([own.weight], dtype=torch.float64), own.rider))


def divisor(side: Tensor) -> float:
    """What to divide the summed numerators by: the sum of weights, or 1 where nobody has any."""
    return float(side[0]) or 1.0


def mean_of(channel: Channel, total: Tensor, side: Tensor) -> Tensor:
    """The mean, in the memory of the summed numerators."""
    by = divisor(side)
    return total if by == 1.0 else _scaled(channel, total.div_, total, by)


def reduced(channel: Channel, total: Tensor, side: Tensor) -> Reduced:
    """The mean, in the memory of the summed numerators, and what was summed beside them."""
    return Reduced(mean_of(channel, total, side), float(side[0]), side[1:])


def _scaled(channel: Channel, scale: Callable[[float], Tensor], tensor: Tensor, by: float) -> Tensor:
    return channel.compute(CodingCost("scale", "", tensor.numel()), partial(scale, by))
