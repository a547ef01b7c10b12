"""Losses and penalties of linear models."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.errors import ConfigError
from farflung.options import flag_option, whole_option

__all__ = ["Hinge", "Logistic", "Multinomial", "Objective", "SquaredHinge"]

_BLOCK = 8192
"""Margins at a time: they stay in the processor's second cache from the first operation to the last."""
_KINK = 0.01
"""Width of the quadratic piece in place of the hinge's kink."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective(ABC):
    r"""Half the squared weights, and a loss of each sample by its margins.

    .. math:: F(W, v) = \tfrac{1}{2} \|W\|^2 + \tfrac{\rho}{2} \|v\|^2
        + C \sum_i \ell(x_i W + s v,\, y_i)

    The intercept is :math:`s v`, with the scaling s and the share :math:`\rho` of the penalty, 0 or 1. Unless an
    objective says otherwise, targets are -1.0 or 1.0, of shape (samples, outputs), and each output is a problem of its
    own.

    Args:
      C: weight of the losses, above 0, as in scikit-learn: the larger, the weaker is the penalty.
      fit_intercept: whether there is an intercept.
      intercept_scaling: s, above 0: the value of the constant feature that the intercept is the weight of.

    Raises:
      ConfigError: a setting out of its range.
    """

    intercept_penalty: ClassVar[float] = 1.0
    r""":math:`\rho`: 1 as in liblinear and ``LinearSVC``, 0 as in ``LogisticRegression``."""
    curvature: ClassVar[float]
    """The largest second derivative of a sample's loss by its margins."""

    C: float = 1.0
    fit_intercept: bool = True
    intercept_scaling: float = 1.0

    def __post_init__(self) -> None:
        for option in ("C", "intercept_scaling"):
            value = getattr(self, option)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
                raise ConfigError(f"objective: {option} {value!r} must be a number above 0")
        flag_option("objective", "fit_intercept", self.fit_intercept)

    def outputs(self, targets: Tensor) -> int:
        """Columns of the margins."""
        return targets.shape[1]

    @abstractmethod
    def loss(self, margins: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        """Computes C times the sum of the losses, and its derivative by the margins.

        Args:
          margins: (samples, outputs), float64.
          targets: of the samples.

        Returns:
          The sum, and the derivative of shape (samples, outputs).
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Logistic(Objective):
    r"""The negative logarithm of the label's probability; the intercept is not penalised.

    .. math:: \ell(z, y) = \log(1 + e^{-y z}), \qquad \ell'(z, y) = \frac{-y}{1 + e^{y z}}
    """

    intercept_penalty = 0.0
    curvature = 0.25

    @override
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Multinomial(Objective):
    r"""The negative logarithm of the label's probability under a softmax; the intercept is not penalised.

    .. math:: \ell(z, y) = \log \sum_c e^{z_c} - z_y, \qquad
        \frac{\partial \ell}{\partial z_c} = \frac{e^{z_c}}{\sum_d e^{z_d}} - [c = y]

    Targets are classes from 0 on, int64, of shape (samples,). The curvature is that of two classes which share all
    probability (Böhning 1992).

    Args:
      classes: the number of classes, at least 2; each has a margin.
    """

    intercept_penalty = 0.0
    curvature = 0.5

    classes: int

    @override
    def __post_init__(self) -> None:
        Objective.__post_init__(self)
        whole_option("objective", "classes", self.classes, 2)

    @override
    def outputs(self, targets: Tensor) -> int:
        return self.classes

    @override
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


@dataclass(frozen=True, slots=True, kw_only=True)
class SquaredHinge(Objective):
    r"""The square of what the margin is short of 1.

    .. math:: \ell(z, y) = \max(0, 1 - y z)^2, \qquad \ell'(z, y) = -2 y \max(0, 1 - y z)
    """

    curvature = 2.0

    @override
    def loss(self, margins: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        slack = (margins * targets).neg_().add_(1).clamp_(min=0)
        flat = slack.view(-1)
        return self.C * float(flat @ flat), slack.mul_(targets).mul_(-2 * self.C)


@dataclass(frozen=True, slots=True, kw_only=True)
class Hinge(Objective):
    r"""What the margin is short of 1, with a parabola of width :math:`\delta` = 0.01 in place of the kink.

    .. math:: \ell(z, y) = \begin{cases} 1 - y z & y z \le 1 - \delta / 2 \\
        (1 - y z + \delta / 2)^2 / 2 \delta & |1 - y z| < \delta / 2 \\
        0 & y z \ge 1 + \delta / 2 \end{cases}

    It lies at most :math:`\delta / 8` above the hinge, and only for samples whose margin is that close to 1. So any
    solver of smooth losses minimises it; on a9a the minimum has a hinge loss 1.2e-5 above the least, relative to it.

    References: Chapelle 2007, section 2.2.
    """

    curvature = 1 / _KINK

    @override
    def loss(self, margins: Tensor, targets: Tensor) -> tuple[float, Tensor]:
        slack = (margins * targets).neg_().add_(1 + _KINK / 2).clamp_(min=0)
        bent = slack.clamp(max=_KINK)
        total = float((slack - bent).sum()) + float((bent * bent).sum()) / (2 * _KINK)
        return self.C * total, bent.mul_(targets).mul_(-self.C / _KINK)
