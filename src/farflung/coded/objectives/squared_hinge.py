"""The support vector machine with squared slacks."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from farflung.coded.objectives.intercepts import PenalisedIntercept

__all__ = ["SquaredHinge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SquaredHinge(PenalisedIntercept):
    r"""The square of what the margin is short of 1.

    .. math:: \ell(z, y) = \max(0, 1 - y z)^2, \qquad \ell'(z, y) = -2 y \max(0, 1 - y z)

    Targets are -1.0 or 1.0, of shape (samples, outputs): each output is a problem of its own.

    Args:
      C: weight of the losses, above 0.
      fit_intercept: whether there is an intercept.
      intercept_scaling: the constant feature that the intercept is the weight of, above 0.
    """

    @property
    def curvature(self) -> float:
        """2, wherever the margin is short of 1."""
        return 2.0

    def outputs(self, targets: Tensor) -> int:
        return targets.shape[1]

    def loss(self, margins: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        slack = (margins * targets).neg_().add_(1).clamp_(min=0)
        flat = slack.view(-1)
        return self.C * float(flat @ flat), slack.mul_(targets).mul_(-2 * self.C)
