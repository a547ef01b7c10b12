"""The support vector machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.coded.objectives.intercepts import PenalisedIntercept

__all__ = ["Hinge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hinge(PenalisedIntercept):
    r"""What the margin is short of 1.

    .. math:: \ell(z, y) = \max(0, 1 - y z), \qquad \ell'(z, y) = -y\, [y z < 1]

    At the kink the subgradient is 0. Targets are -1.0 or 1.0, of shape (samples, outputs): each output is a problem of
    its own.

    Args:
      C: weight of the losses, above 0.
      fit_intercept: whether there is an intercept.
      intercept_scaling: the constant feature that the intercept is the weight of, above 0.
    """

    @property
    def curvature(self) -> None:
        """It has a kink."""
        return None

    def outputs(self, targets: Tensor) -> int:
        return targets.shape[1]

    def loss(self, margins: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        slack = (margins * targets).neg_().add_(1).clamp_(min=0)
        total = float(slack.sum())
        return self.C * total, torch.sign(slack, out=slack).mul_(targets).mul_(-self.C)
