"""Approximate Hessian from the means and sizes of columns, for centring and scaling inside a solver."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from farflung.coded.linear_model import Problem
from farflung.errors import BadSamples
from farflung.seeding import create_generator

__all__ = ["ColumnStats", "Preconditioner"]

_NUM_PROBES = 8
"""Number of random combinations of samples for the sizes; their relative error is one half."""
_SPREAD = 1e3
"""Factor around the median within which curvatures count as equal, since L-BFGS learns those quickly."""
_MAX_CURVATURE = 2.0
"""Maximum assumed curvature; the hinge has more only in its parabola, with few samples."""


@dataclass(frozen=True, slots=True, eq=False)
class ColumnStats:
    r"""Mean and size of each column of the samples, measured by one product.

    With weights :math:`\omega_i` of samples and random normal :math:`z_i`, the mean is :math:`m = \sum_i
    \omega_i x_i / \sum_i \omega_i`, and the expected square of :math:`\sum_i \sqrt{\omega_i} z_i (x_i - m)` is
    :math:`\sum_i \omega_i (x_i - m)^2`.

    Args:
      means: Means, (features, 1).
      sizes: Roots of the sums of squares around the means, (features, 1).
      total: Weight of all samples.
    """

    means: Tensor
    sizes: Tensor
    total: float

    @classmethod
    async def measure(cls, problem: Problem) -> Self:
        """Measures the columns of a problem's samples, by one transposed product."""
        samples = problem.products.samples
        weights = torch.ones(samples, 1, dtype=torch.float64)
        if problem.sample_weights is not None:
            weights = problem.sample_weights.mean(dim=1, keepdim=True)
        random = create_generator(0, "column sizes")
        probes = torch.randn(samples, _NUM_PROBES, generator=random, dtype=torch.float64) * weights.sqrt()
        sums = await problem.products.multiply_transposed(torch.cat([weights, probes], dim=1))
        total = float(weights.sum())
        means = sums[:, :1] / total
        deviations = sums[:, 1:] - means * probes.sum(dim=0)
        return cls(means, deviations.norm(dim=1, keepdim=True) / _NUM_PROBES**0.5, total)


@dataclass(frozen=True, slots=True, eq=False)
class Preconditioner:
    r"""An approximate Hessian P of an objective, whose inverse is applied in time linear in the weights.

    .. math:: P = S^T (\operatorname{diag}(h) + t t^T) S

    S replaces the intercept by that of centred columns, since a constant added to a column changes nothing. h
    is the Hessian's diagonal, with small differences between columns ignored. t is the penalty of the intercept
    in these terms. Without an intercept S is the identity, and t is the means' share.

    Args:
      scales: Diagonal h, (rows, 1).
      tilt: Vector t, (rows, 1).
      shear: Amount that S adds to the intercept for each weight, (features, 1).
    """

    scales: Tensor
    tilt: Tensor
    shear: Tensor

    @classmethod
    def from_problem(cls, problem: Problem, stats: ColumnStats) -> Self:
        """Builds the preconditioner of a problem from its columns.

        Raises:
          BadSamples: squares of the features are infinite.
        """
        objective = problem.objective
        curvature = objective.loss_weight * min(objective.curvature, _MAX_CURVATURE)
        scales = curvature * stats.sizes**2 + float(objective.has_penalty)
        scales = torch.where(scales > 0, scales, 1.0)
        tilt, shear = (curvature * stats.total) ** 0.5 * stats.means, torch.zeros_like(stats.means)
        if objective.fit_intercept:
            shear = stats.means / objective.intercept_scaling
            share = (objective.intercept_penalty * objective.has_penalty) ** 0.5
            tilt = share * torch.cat([-shear, shear.new_ones(1, 1)])
            constant = curvature * stats.total * objective.intercept_scaling**2
            scales = torch.cat([scales, scales.new_full((1, 1), constant)])
        if not bool((scales + tilt * tilt).isfinite().all()):
            raise BadSamples("the squares of the features are not finite in float64: scale the features")
        median = scales[: len(shear)].log().median().exp()
        ratios = scales / median
        excess = ratios.clamp(min=_SPREAD) / _SPREAD * ratios.clamp(max=1 / _SPREAD) * _SPREAD
        return cls(median * excess, tilt, shear)

    def solve(self, gradient: Tensor) -> Tensor:
        """Multiplies a gradient, (rows, outputs), by the inverse of P."""
        features = len(self.shear)
        weights, intercepts = gradient[:features], gradient[features:]
        if len(intercepts):
            weights = weights - self.shear * intercepts
        sheared = torch.cat([weights, intercepts]) / self.scales
        column = self.tilt / self.scales
        share = (self.tilt * sheared).sum(dim=0) / (1 + (self.tilt * column).sum())
        step = sheared - column * share
        weights, intercepts = step[:features], step[features:]
        if len(intercepts):
            intercepts = intercepts - (self.shear * weights).sum(dim=0, keepdim=True)
        return torch.cat([weights, intercepts])
