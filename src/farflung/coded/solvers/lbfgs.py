"""Limited-memory BFGS with two products for each iterate, and its line search, which costs no message."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farflung.coded.problem import Problem
from farflung.coded.solvers.base import Iterate
from farflung.options import number_option, whole_option
from farflung.types import State

__all__ = ["LBFGS", "LBFGSState", "Ray", "strong_wolfe"]

_DECREASE, _FLATNESS = 1e-4, 0.1
r""":math:`c_1` and :math:`c_2` of the strong Wolfe conditions."""
_DRIFT = 1e-12
"""Change of the objective that rounding alone explains, relative to it."""
_REFRESH = 50
"""Iterates after which margins are computed afresh."""
_TRIALS = 60
_ROUNDING = 1e-14
"""Relative error of an objective: near the optimum, changes below it say nothing."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LBFGSState(Iterate):
    """State of L-BFGS.

    Args:
      margins: at the weights, (samples, outputs).
      gradient: at the weights.
      moves: differences of the last weights, (pairs, rows, outputs), oldest first.
      turns: differences of their gradients.
    """

    margins: Tensor
    gradient: Tensor
    moves: Tensor
    turns: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LBFGS:
    r"""Steps along :math:`-H g`, where H is the inverse Hessian that the last steps have shown.

    Margins are linear in the weights, so :math:`X (w + a d) = X w + a X d` and the line search costs no message: an
    iterate is one product with the direction and one transposed product, whatever the number of trial steps. That
    makes a thorough search and a long memory worth their while. Sums of many steps drift from :math:`X w`, so the
    product with the weights is computed afresh every 50 iterates, as another column of a product that is made anyway,
    and at the end.

    The gap is half of :math:`g^T H g` over the objective: the expected gain of a whole step. The true one is larger:
    about 100 times on a9a, and up to 2,000 times on Covertype, whose columns are far from independent. So the tolerance
    is small.

    Args:
      tol: the gap at which it has converged.
      memory: pairs of differences that H is made of.

    Raises:
      ConfigError: a setting out of its range.

    References: Nocedal & Wright 2006, alg. 7.4 and 7.5.
    """

    tol: float = 1e-10
    memory: int = 100

    def __post_init__(self) -> None:
        number_option("lbfgs", "tol", self.tol, 0)
        whole_option("lbfgs", "memory", self.memory, 1)

    async def init(self, problem: Problem, weights: Tensor | None = None) -> LBFGSState:
        """Makes the first state by one transposed product, and one more product for given weights."""
        weights, margins = await problem.start(weights)
        loss, slopes = problem.objective.loss(margins, problem.targets)
        penalty, gradient = problem.penalty(weights)
        gradient = gradient + await problem.transposed(slopes)
        return LBFGSState(
            weights=weights,
            objective=loss + penalty,
            gap=1.0,
            iterations=0,
            converged=not bool(gradient.any()),
            margins=margins,
            gradient=gradient,
            moves=weights.new_zeros(0, *weights.shape),
            turns=weights.new_zeros(0, *weights.shape),
        )

    async def step(self, problem: Problem, state: LBFGSState) -> LBFGSState:
        """Takes one step by two products, and a third when it has converged."""
        direction = _downhill(state.gradient, state.moves, state.turns)
        iterations, outputs = state.iterations + 1, problem.shape[1]
        if iterations % _REFRESH:
            margins, change = state.margins, await problem.margins(direction)
        else:
            both = await problem.margins(torch.cat([state.weights, direction], dim=1))
            margins, change = both[:, :outputs], both[:, outputs:]
        ray = Ray(problem, state.weights, margins, direction, change)
        start = ray.at(0.0)
        guess = 1.0 if len(state.moves) else _cautious(ray, start)
        point = strong_wolfe(ray, start, guess, decrease=_DECREASE, flatness=_FLATNESS)
        if point is None:
            return replace(state, iterations=iterations, converged=True)
        gradient = problem.penalty(point.weights)[1] + await problem.transposed(point.slopes)
        moves, turns = state.moves, state.turns
        move, turn = point.weights - state.weights, gradient - state.gradient
        if float((move * turn).sum()) > 0:
            moves = torch.cat([moves, move[None]])[-self.memory :]
            turns = torch.cat([turns, turn[None]])[-self.memory :]
        gain = -0.5 * float((gradient * _downhill(gradient, moves, turns)).sum())
        ended = LBFGSState(
            weights=point.weights,
            objective=point.objective,
            gap=gain / point.objective,
            iterations=iterations,
            converged=False,
            margins=point.margins,
            gradient=gradient,
            moves=moves,
            turns=turns,
        )
        return await self._confirmed(problem, ended) if ended.gap <= self.tol else ended

    def restored(self, tree: State) -> LBFGSState:
        return LBFGSState.from_tree(tree)

    async def _confirmed(self, problem: Problem, state: LBFGSState) -> LBFGSState:
        """Compares the objective with that of fresh margins: converged, or on from these."""
        margins = await problem.margins(state.weights)
        loss, slopes = problem.objective.loss(margins, problem.targets)
        penalty, gradient = problem.penalty(state.weights)
        objective = loss + penalty
        drift = abs(objective - state.objective)
        state = replace(state, margins=margins, objective=objective)
        if drift <= max(self.tol, _DRIFT) * objective:
            return replace(state, converged=True)
        return replace(state, gradient=gradient + await problem.transposed(slopes))


def _cautious(ray: Ray, start: Point) -> float:
    """Gives the step to the lowest point of a parabola that is nowhere below the objective."""
    objective = ray.problem.objective
    bend = objective.C * objective.curvature * float((ray.change * ray.change).sum())
    return -start.slope / (bend + 2 * ray.problem.penalty(ray.direction)[0])


def _downhill(gradient: Tensor, moves: Tensor, turns: Tensor) -> Tensor:
    """Computes :math:`-H g` by two loops over the pairs."""
    direction = -gradient
    pairs = [(move, turn, float((move * turn).sum())) for move, turn in zip(moves, turns, strict=True)]
    shares: list[float] = []
    for move, turn, bend in reversed(pairs):
        shares.append(float((move * direction).sum()) / bend)
        direction = direction - shares[-1] * turn
    if pairs:
        _, turn, bend = pairs[-1]
        direction = direction * (bend / float((turn * turn).sum()))
    for (move, turn, bend), share in zip(pairs, reversed(shares), strict=True):
        direction = direction + (share - float((turn * direction).sum()) / bend) * move
    return direction


# --- the line search -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Ray:
    """The objective along a direction, from some weights on.

    Args:
      problem: has the objective.
      weights: at its beginning.
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
        """Gives the point that many directions away."""
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
      objective: at the point.
      slope: derivative of the objective by the length.
      weights: at the point.
      margins: at the point.
      slopes: derivative of the losses by the margins.
    """

    length: float
    objective: float
    slope: float
    weights: Tensor
    margins: Tensor
    slopes: Tensor


def strong_wolfe(ray: Ray, start: Point, guess: float, *, decrease: float, flatness: float) -> Point | None:
    r"""Finds a point at which the objective has fallen enough and is flat enough.

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
    """Gives the length at which a linear slope would be zero, well inside the bracket."""
    if high is None:
        return 4 * low.length
    width = high.length - low.length
    rise = high.slope - low.slope
    share = -low.slope / rise if math.isfinite(rise) and rise > 0 else 0.5
    return low.length + min(max(share, 0.1), 0.9) * width
