"""Logistic regression of two classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.coded.objectives.intercepts import FreeIntercept

__all__ = ["Logistic"]

_BLOCK = 8192
"""Margins at a time: they stay in the processor's second cache from the first operation to the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Logistic(FreeIntercept):
    r"""The negative logarithm of the label's probability.

    .. math:: \ell(z, y) = \log(1 + e^{-y z}), \qquad \ell'(z, y) = \frac{-y}{1 + e^{y z}}

    Targets are -1.0 or 1.0, of shape (samples, outputs): each output is a problem of its own.

    Args:
      C: weight of the losses, above 0.
      fit_intercept: whether there is an intercept; it is not penalised.
    """

    @property
    def curvature(self) -> float:
        """A quarter, where the probability is one half."""
        return 0.25

    def outputs(self, targets: Tensor) -> int:
        return targets.shape[1]

    def loss(self, margins: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        slopes = torch.empty_like(margins, memory_format=torch.contiguous_format)
        total = torch.zeros((), dtype=margins.dtype)
        flat = (margins.reshape(-1), targets.reshape(-1), slopes.view(-1))
        for z, y, slope in zip(*(part.split(_BLOCK) for part in flat), strict=True):
            right = z * y
            torch.mul(torch.sigmoid(-right), y, out=slope)
            total -= right.clamp(max=0).sum()
            total += right.abs_().neg_().exp_().log1p_().sum()
        return self.C * float(total), slopes.mul_(-self.C)
