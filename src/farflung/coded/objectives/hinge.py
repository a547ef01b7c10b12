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
        return None

    def outputs(self, targets: Tensor) -> int:
        return targets.shape[1]

    def loss(self, margins: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        slack = (margins * targets).neg_().add_(1).clamp_(min=0)
        total = float(slack.sum())
        return self.C * total, torch.sign(slack, out=slack).mul_(targets).mul_(-self.C)

    def plane(self, margins: Tensor, targets: Tensor, width: float) -> tuple[float, Tensor]:
        r"""A linear function of the margins that is nowhere above the losses, and close to them about these margins.

        .. math:: C \sum_i \ell(z_i, y_i) \ge C \sum_i \alpha_i (1 - y_i z_i), \qquad
            \alpha_i = \operatorname{clip}\left(\frac{1 - y_i z_i}{\delta} + \frac{1}{2},\, 0,\, 1\right)

        Args:
          margins: (samples, outputs).
          targets: as in :meth:`loss`.
          width: :math:`\delta`, above 0; the smaller, the closer at these margins.

        Returns:
          Its value at margins of zero, and its derivative by the margins.
        """
        shares = (margins * targets).neg_().add_(1).div_(width).add_(0.5).clamp_(0, 1)
        return self.C * float(shares.sum()), shares.mul_(targets).mul_(-self.C)
