"""Full-batch gradient descent."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.coded.problem import Problem
from farflung.coded.solvers.interface import Iterate
from farflung.errors import ConfigError
from farflung.options import number_option, whole_option
from farflung.seeding import generator
from farflung.types import State

__all__ = ["GD", "GDState"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GDState(Iterate):
    """Where gradient descent is.

    Args:
      learning_rate: as given, or as found in the beginning.
      point: the weights of this iterate; with a fixed rate they are the best.
      gradient: there.
    """

    learning_rate: float
    point: Tensor
    gradient: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class GD:
    r"""Steps of a fixed length times the gradient, as coded training was first done.

    .. math:: w_{t+1} = w_t - \eta\, g(w_t)

    Where the loss has kinks, g is a subgradient and the steps shrink as :math:`\eta / \sqrt{t}`, t from 1 on; then the
    best weights so far are kept.

    The gap is what the next step would gain if the objective were linear, over the objective.

    Args:
      learning_rate: :math:`\eta`; by default :math:`1 / L` with :math:`L = 1 + C \kappa \lambda`, where
        :math:`\kappa` is the largest second derivative of the loss (1 for the hinge, as if its kink were as wide as its
        margin) and :math:`\lambda` the largest eigenvalue of :math:`X^T X`, the intercept's constant feature included.
        A power iteration finds it from below, so the rate may come out too large, though hardly by the factor of 2
        at which steps would diverge.
      tol: the gap at which it has converged.
      power_rounds: of the power iteration, two products each.

    Raises:
      ConfigError: a setting out of its range.

    References: Lin et al. 2019 (arXiv 1910.10283); Shor 1985 for the steps of subgradients.
    """

    learning_rate: float | None = None
    tol: float = 1e-10
    power_rounds: int = 10

    def __post_init__(self) -> None:
        if self.learning_rate is not None:
            number_option("gd", "learning_rate", self.learning_rate, 0)
        number_option("gd", "tol", self.tol, 0)
        whole_option("gd", "power_rounds", self.power_rounds, 1)

    async def init(self, problem: Problem, weights: Tensor | None = None) -> GDState:
        """One transposed product, another where weights are given, and those of the power iteration."""
        rate = self.learning_rate
        if rate is None:
            eigenvalue = await self._largest_eigenvalue(problem)
            rate = 1 / (1 + problem.objective.C * (problem.objective.curvature or 1.0) * eigenvalue)
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
            point=weights,
            gradient=gradient + await problem.transposed(slopes),
        )

    async def step(self, problem: Problem, state: GDState) -> GDState:
        """Two products.

        Raises:
          ConfigError: the learning rate is so high that the objective is infinite.
        """
        shrinks = problem.objective.curvature is None
        iterations = state.iterations + 1
        rate = state.learning_rate / (math.sqrt(iterations) if shrinks else 1.0)
        point = state.point - rate * state.gradient
        loss, slopes = problem.objective.loss(await problem.margins(point), problem.targets)
        penalty, gradient = problem.penalty(point)
        objective = loss + penalty
        if not math.isfinite(objective):
            raise ConfigError(
                f"gd: diverged at iterate {iterations}: lower learning_rate {state.learning_rate}"
            )
        gradient = gradient + await problem.transposed(slopes)
        gap = rate * float((gradient * gradient).sum()) / objective
        better = not shrinks or objective < state.objective
        return GDState(
            weights=point if better else state.weights,
            objective=objective if better else state.objective,
            gap=gap,
            iterations=iterations,
            converged=gap <= self.tol,
            learning_rate=state.learning_rate,
            point=point,
            gradient=gradient,
        )

    def restored(self, tree: State) -> GDState:
        return GDState.from_tree(tree)

    async def _largest_eigenvalue(self, problem: Problem) -> float:
        vector = torch.randn(
            problem.shape[0], 1, generator=generator(0, "power iteration"), dtype=torch.float64
        )
        eigenvalue = 0.0
        for _ in range(self.power_rounds):
            vector = vector / vector.norm()
            vector = await problem.transposed(await problem.margins(vector))
            eigenvalue = float(vector.norm())
            if eigenvalue == 0:
                break
        return eigenvalue
