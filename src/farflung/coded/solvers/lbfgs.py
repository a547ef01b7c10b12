"""Limited-memory BFGS with one pair of products per iterate."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.coded.problem import Problem
from farflung.coded.solvers.interface import Iterate
from farflung.coded.solvers.line_search import Ray, strong_wolfe
from farflung.errors import Unsupported
from farflung.options import number_option, whole_option
from farflung.types import State

__all__ = ["LBFGS", "LBFGSState"]


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
    memory: int = 100
    tol: float = 1e-8
    refresh: int = 50
    flatness: float = 0.1

    async def init(self, problem: Problem) -> LBFGSState:
        if problem.objective.curvature is None:
            raise Unsupported("lbfgs: the objective has kinks, at which it gets stuck; use bundle")
        rows, outputs = problem.shape
        weights = torch.zeros(rows, outputs, dtype=torch.float64)
        margins = torch.zeros(problem.products.samples, outputs, dtype=torch.float64)
        objective, slopes = problem.objective.loss(margins, problem.targets)
        gradient = await problem.transposed(slopes)
        none = weights.new_zeros(0, rows, outputs)
        return LBFGSState(
            weights=weights, margins=margins, gradient=gradient, objective=objective, gap=1.0, iterations=0,
            converged=False, moves=none, turns=none,
        )

    async def step(self, problem: Problem, state: LBFGSState) -> LBFGSState:
        direction = _direction(state.gradient, state.moves, state.turns)
        margins = state.margins
        change = await problem.margins(direction)
        ray = Ray(problem, state.weights, margins, direction, change)
        start = ray.at(0.0)
        guess = 1.0
        if not len(state.moves):
            pen = float((problem.penalty(direction)[0]) * 2)
            guess = -start.slope / (problem.objective.C * problem.objective.curvature * float((change * change).sum()) + pen)
        point = strong_wolfe(ray, start, guess, decrease=1e-4, flatness=self.flatness)
        gradient = problem.penalty(point.weights)[1] + await problem.transposed(point.slopes)
        move, turn = point.weights - state.weights, gradient - state.gradient
        moves = torch.cat([state.moves, move[None]])[-self.memory:]
        turns = torch.cat([state.turns, turn[None]])[-self.memory:]
        gap = -0.5*float((gradient * _direction(gradient, moves, turns)).sum())/point.objective
        return LBFGSState(weights=point.weights, margins=point.margins, gradient=gradient, objective=point.objective,
          gap=gap, iterations=state.iterations+1, converged=gap<self.tol, moves=moves, turns=turns)

def _direction(gradient: Tensor, moves: Tensor, turns: Tensor) -> Tensor:
    direction = -gradient
    pairs = list(zip(moves, turns, strict=True))
    shares = []
    for move, turn in reversed(pairs):
        share = (move * direction).sum() / (move * turn).sum()
        direction = direction - share * turn
        shares.append(share)
    if pairs:
        move, turn = pairs[-1]
        direction = direction * ((move * turn).sum() / (turn * turn).sum())
    for (move, turn), share in zip(pairs, reversed(shares), strict=True):
        direction = direction + (share - (turn * direction).sum() / (move * turn).sum()) * move
    return direction
