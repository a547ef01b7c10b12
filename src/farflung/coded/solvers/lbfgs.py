"""Limited-memory BFGS with two products for each iterate."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farflung.coded.problem import Problem
from farflung.coded.solvers.interface import Iterate
from farflung.coded.solvers.line_search import Point, Ray, strong_wolfe
from farflung.errors import ConfigError, Unsupported
from farflung.options import number_option, whole_option
from farflung.types import State

__all__ = ["LBFGS", "LBFGSState"]

_DECREASE = 1e-4
_DRIFT = 1e-12
"""Of the objective, that rounding alone explains."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LBFGSState(Iterate):
    """Where L-BFGS is.

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
    product with the weights is asked for anew now and then, as another column of one that is made anyway, and at the
    end.

    The gap is half of :math:`g^T H g` over the objective: what a whole step is still expected to gain. The true one is
    larger: about 100 times on a9a, and up to 2,000 times on Covertype, whose columns are far from independent. So the
    tolerance is small.

    Args:
      tol: the gap at which it has converged.
      memory: pairs of differences that H is made of.
      flatness: :math:`c_2` of the line search's strong Wolfe conditions, above 0.0001 and below 1.
      refresh: iterates after which margins are computed anew.

    Raises:
      ConfigError: a setting out of its range.

    References: Nocedal & Wright 2006, alg. 7.4 and 7.5.
    """

    tol: float = 1e-10
    memory: int = 100
    flatness: float = 0.1
    refresh: int = 50

    def __post_init__(self) -> None:
        number_option("lbfgs", "tol", self.tol, 0)
        whole_option("lbfgs", "memory", self.memory, 1)
        whole_option("lbfgs", "refresh", self.refresh, 1)
        if not _DECREASE < self.flatness < 1:
            raise ConfigError(f"lbfgs: flatness {self.flatness!r} must be above {_DECREASE} and below 1")

    async def init(self, problem: Problem, weights: Tensor | None = None) -> LBFGSState:
        """One transposed product, and another where weights are given.

        Raises:
          Unsupported: the loss has kinks.
        """
        if problem.objective.curvature is None:
            raise Unsupported("lbfgs: it gets stuck where a loss has kinks; use bundle or gd for the hinge")
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
        """Two products; a third when it has converged."""
        direction = _downhill(state.gradient, state.moves, state.turns)
        iterations, outputs = state.iterations + 1, problem.shape[1]
        if iterations % self.refresh:
            margins, change = state.margins, await problem.margins(direction)
        else:
            both = await problem.margins(torch.cat([state.weights, direction], dim=1))
            margins, change = both[:, :outputs], both[:, outputs:]
        ray = Ray(problem, state.weights, margins, direction, change)
        start = ray.at(0.0)
        guess = 1.0 if len(state.moves) else _cautious(ray, start)
        point = strong_wolfe(ray, start, guess, decrease=_DECREASE, flatness=self.flatness)
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
        """Converged if the objective is what the sums of steps say; else with the margins as they are."""
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
    """The step to the lowest point of a parabola that is nowhere below the objective."""
    objective = ray.problem.objective
    bend = objective.C * (objective.curvature or 0.0) * float((ray.change * ray.change).sum())
    return -start.slope / (bend + 2 * ray.problem.penalty(ray.direction)[0])


def _downhill(gradient: Tensor, moves: Tensor, turns: Tensor) -> Tensor:
    """:math:`-H g` by two loops over the pairs."""
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
