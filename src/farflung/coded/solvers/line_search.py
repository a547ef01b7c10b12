"""A line search that costs no message: margins are linear, so those along a line follow from two points of it."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from farflung.coded.problem import Problem

__all__ = ["Ray", "strong_wolfe"]

_TRIALS = 60
_ROUNDING = 1e-14
"""Relative error of an objective: near the optimum, changes below it say nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class Ray:
    """The objective from some weights on along a direction.

    Args:
      problem: whose objective.
      weights: where it begins.
      margins: at the weights.
      direction: of the shape of the weights.
      change: what the direction adds to the margins.
    """

    problem: Problem
    weights: Tensor
    margins: Tensor
    direction: Tensor
    change: Tensor

    def at(self, length: float) -> Point:
        """The point that many directions away."""
        weights = self.weights + length * self.direction
        margins = self.margins + length * self.change
        loss, slopes = self.problem.objective.loss(margins, self.problem.targets)
        penalty, gradient = self.problem.penalty(weights)
        slope = float((slopes * self.change).sum()) + float((gradient * self.direction).sum())
        return Point(length, loss + penalty, slope, weights, margins, slopes)


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """A point of a ray.

    Args:
      length: directions from its beginning.
      objective: there.
      slope: derivative of the objective by the length.
      weights: there.
      margins: there.
      slopes: derivative of the losses by the margins.
    """

    length: float
    objective: float
    slope: float
    weights: Tensor
    margins: Tensor
    slopes: Tensor


def strong_wolfe(ray: Ray, start: Point, guess: float, *, decrease: float, flatness: float) -> Point | None:
    r"""A point at which the objective has fallen enough and is flat enough.

    .. math:: \varphi(a) \le \varphi(0) + c_1 a \varphi'(0), \qquad |\varphi'(a)| \le c_2 |\varphi'(0)|

    The objective is convex, so its slope rises along the ray, and where it crosses zero is closed in from both sides.

    Args:
      ray: along a descent direction.
      start: ``ray.at(0)``.
      guess: the length to try first.
      decrease: :math:`c_1`.
      flatness: :math:`c_2`, above :math:`c_1` and below 1.

    Returns:
      ``None`` where the objective falls by no more than its rounding errors.

    References: Nocedal & Wright 2006, eq. 3.7 and alg. 3.5, with the secant of the slopes for interpolation.
    """
    low, high = start, None
    length = guess
    for _ in range(_TRIALS):
        point = ray.at(length)
        allowed = start.objective + decrease * length * start.slope + _ROUNDING * abs(start.objective)
        if not point.objective <= allowed or point.slope > -flatness * start.slope:
            high = point
        elif point.slope < flatness * start.slope:
            low = point
        else:
            return point
        length = _between(low, high)
    return low if low.objective < start.objective else None


def _between(low: Point, high: Point | None) -> float:
    """Where the slope would be zero if it were linear, well inside of what is left."""
    if high is None:
        return 4 * low.length
    width = high.length - low.length
    rise = high.slope - low.slope
    share = -low.slope / rise if math.isfinite(rise) and rise > 0 else 0.5
    return low.length + min(max(share, 0.1), 0.9) * width
