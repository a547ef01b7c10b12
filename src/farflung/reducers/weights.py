"""Weighted means: numerators and the sum of weights travel together, and the division comes last."""

from __future__ import annotations

import torch
from torch import Tensor

from farflung.types import Contribution, Reduced

__all__ = ["divisor", "numerator", "reduced", "side_of"]


def numerator(own: Contribution) -> Tensor:
    """Weight times tensor, in the tensor's own memory."""
    return own.tensor if own.weight == 1.0 else own.tensor.mul_(own.weight)


def side_of(own: Contribution) -> Tensor:
    """What is summed beside the tensor: the weight, then the rider."""
    return torch.cat((torch.tensor([own.weight], dtype=torch.float64), own.rider))


def divisor(side: Tensor) -> float:
    """What to divide the summed numerators by: the sum of weights, or 1 where nobody has any."""
    return float(side[0]) or 1.0


def reduced(total: Tensor, side: Tensor) -> Reduced:
    """The mean, in the memory of the summed numerators."""
    by = divisor(side)
    return Reduced(total if by == 1.0 else total.div_(by), float(side[0]), side[1:])
