"""Full-batch gradient descent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.coded.problem import Problem
from farflung.coded.solvers.base import Iterate
from farflung.errors import ConfigError
from farflung.options import number_option
from farflung.seeding import generator
from farflung.types import State

__all__ = ["GD", "GDState"]

_POWER_ROUNDS = 10
"""Rounds of the power iteration, two products each."""
_CURVATURE = 2.0
"""The most for the default rate; the hinge has more in its parabola alone, where few samples are."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GDState(Iterate):
    """State of gradient descent.

    Args:
      learning_rate: as given, or as found in the beginning.
      gradient: at the weights.
    """

    learning_rate: float
    gradient: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GD:
    r"""Steps of a fixed length times the gradient, as coded training was first done.

    .. math:: w_{t+1} = w_t - \eta\, \nabla F(w_t)

    The gap is the gain of the next step if the objective were linear, over the objective.

    Args:
      learning_rate: :math:`\eta`; by default :math:`1 / L` with :math:`L = 1 + C \kappa \lambda`, where
        :math:`\kappa` is the largest second derivative of the loss, but at most 2, and :math:`\lambda` the largest
        eigenvalue of :math:`X^T X`, the intercept's constant feature included. A power iteration finds it from below,
        so the rate may come out too large, though hardly by the factor of 2 at which steps would diverge.
      tol: the gap at which it has converged.

    Raises:
      ConfigError: a setting out of its range.

    References: Lin et al. 2019 (arXiv 1910.10283).
    """

    learning_rate: float | None = None
    tol: float = 1e-10

    def __post_init__(self) -> None:
        if self.learning_rate is not None:
            number_option("gd", "learning_rate", self.learning_rate, 0)
        number_option("gd", "tol", self.tol, 0)

    async def init(self, problem: Problem, weights: Tensor | None = None) -> GDState:
        """Makes the first state by one transposed product, one more for given weights, and the power iteration."""
        rate = self.learning_rate
        if rate is None:
            eigenvalue = await _largest_eigenvalue(problem)
            curvature = min(problem.objective.curvature, _CURVATURE)
            rate = 1 / (1 + problem.objective.C * curvature * eigenvalue)
        weights, margins = await problem.start(weights)
        loss, slopes = problem.objective.loss(margins, problem.targets)
        penalty, gradient = problem.penalty(weights)
        return GDState(
            weights=weights,
            objective=loss + penalty,
            gap=1.0,
            iterations=0,
            converged=False,
            learning_rate=rate,
            gradient=gradient + await problem.transposed(slopes),
        )

    async def step(self, problem: Problem, state: GDState) -> GDState:
        """Takes one step by two products.

        Raises:
          ConfigError: the learning rate is so high that the objective is infinite.
        """
        iterations, rate = state.iterations + 1, state.learning_rate
        weights = state.weights - rate * state.gradient
        loss, slopes = problem.objective.loss(await problem.margins(weights), problem.targets)
        penalty, gradient = problem.penalty(weights)
        objective = loss + penalty
        if not math.isfinite(objective):
            raise ConfigError(f"gd: diverged at iterate {iterations}: lower learning_rate {rate}")
        gradient = gradient + await problem.transposed(slopes)
        gap = rate * float((gradient * gradient).sum()) / objective
        return GDState(
            weights=weights,
            objective=objective,
            gap=gap,
            iterations=iterations,
            converged=gap <= self.tol,
            learning_rate=rate,
            gradient=gradient,
        )

    def restored(self, tree: State) -> GDState:
        return GDState.from_tree(tree)


async def _largest_eigenvalue(problem: Problem) -> float:
    vector = torch.randn(problem.shape[0], 1, generator=generator(0, "power iteration"), dtype=torch.float64)
    eigenvalue = 0.0
    for _ in range(_POWER_ROUNDS):
        vector = vector / vector.norm()
        vector = await problem.transposed(await problem.margins(vector))
        eigenvalue = float(vector.norm())
        if eigenvalue == 0:
            break
    return eigenvalue
