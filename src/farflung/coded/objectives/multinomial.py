"""Logistic regression of any number of classes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from farflung.coded.objectives.intercepts import FreeIntercept
from farflung.options import whole_option

__all__ = ["Multinomial"]

_BLOCK = 8192
"""Entries at a time; see :mod:`farflung.coded.objectives.logistic`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Multinomial(FreeIntercept):
    r"""The negative logarithm of the label's probability under a softmax of one margin for each class.

    .. math:: \ell(z, y) = \log \sum_c e^{z_c} - z_y, \qquad
        \frac{\partial \ell}{\partial z_c} = \frac{e^{z_c}}{\sum_d e^{z_d}} - [c = y]

    Targets are classes from 0 on, int64, of shape (samples,).

    Args:
      classes: how many there are, 2 or more.
      C: weight of the losses, above 0.
      fit_intercept: whether there is an intercept; it is not penalised.
    """

    classes: int

    @override
    def __post_init__(self) -> None:
        FreeIntercept.__post_init__(self)
        whole_option("objective", "classes", self.classes, 2)

    @property
    def curvature(self) -> float:
        """A half: two classes share all probability (Böhning 1992)."""
        return 0.5

    def outputs(self, targets: Tensor) -> int:
        return self.classes

    def loss(self, margins: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        slopes = torch.empty_like(margins, memory_format=torch.contiguous_format)
        total = torch.zeros((), dtype=margins.dtype)
        rows = max(1, _BLOCK // self.classes)
        parts = (margins, targets.unsqueeze(1), slopes)
        for z, y, slope in zip(*(part.split(rows) for part in parts), strict=True):
            highest = z.amax(dim=1, keepdim=True)
            torch.sub(z, highest, out=slope)
            total -= slope.gather(1, y).sum()
            sums = slope.exp_().sum(dim=1, keepdim=True)
            total += sums.log().sum()
            slope.div_(sums).scatter_add_(1, y, slope.new_full((len(y), 1), -1.0))
        return self.C * float(total), slopes.mul_(self.C)
