"""Cutting planes for the hinge, with a duality gap."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farflung.coded.objectives.hinge import Hinge
from farflung.coded.problem import Problem
from farflung.coded.solvers.interface import Iterate
from farflung.coded.solvers.simplex import over_simplex
from farflung.errors import Unsupported
from farflung.options import number_option, whole_option
from farflung.types import State

__all__ = ["Bundle", "BundleState"]


_WIDTH, _NO_WIDTH = 0.5, 1e-12
_BEYOND = 0.1
_LIFT = 0.3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BundleState(Iterate):
    """Where the bundle method is.

    Args:
      margins: at the weights, (samples, 1).
      bound: the least of the planes and the penalty, which the objective is nowhere below.
      target: the weights at which the planes make the objective least.
      normals: of the planes, (planes, rows).
      offsets: of the planes, (planes,).
    """

    margins: Tensor
    bound: float
    target: Tensor
    normals: Tensor
    offsets: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Bundle:
    r"""Minimises planes that lie below the losses, and cuts off the minimum by another plane.

    .. math:: \min_w \tfrac{1}{2} \|w\|^2 + \max_j \left(a_j^T w + b_j\right)

    Its dual is a small program over the simplex, and the dual's value a bound of the objective from below. The weights
    move from the best so far towards that minimum, as far as the objective falls: the search is exact and costs no
    message, since margins are linear. An iterate is one product with the target and one transposed product.

    OCAS takes the plane a tenth of the way beyond the best weights, where it is sure to lift the minimum by the whole
    gap. Here it is taken at the best weights, with the subgradient of a hinge whose kink is a slope of width
    :math:`\delta`, half the square root of the gap: with
    :math:`\alpha_i = \operatorname{clip}((1 - y_i z_i) / \delta + \tfrac{1}{2}, 0, 1)` the plane
    :math:`C \sum_i \alpha_i (1 - y_i z_i)` is below the losses everywhere, and close to them over a wider range, which
    saves a third of the rounds. What it lifts is known before it is asked for; if that is less than 0.3 of the gap,
    OCAS's plane is taken instead.

    The gap is that between the objective and the bound, over the objective. It is a proof: the true one is no larger.

    Args:
      tol: the gap at which it has converged.
      planes: the most that are kept. Beyond it those that count least are merged into one, by their shares, so that the
        bound never falls.

    Raises:
      ConfigError: a setting out of its range.

    References: Teo et al. 2010 (BMRM), alg. 1; Franc & Sonnenburg 2009 (OCAS), alg. 2; Kiwiel 1983 for the plane that
    others are merged into.
    """

    tol: float = 1e-4
    planes: int = 300

    def __post_init__(self) -> None:
        number_option("bundle", "tol", self.tol, 0)
        whole_option("bundle", "planes", self.planes, 2)

    async def init(self, problem: Problem, weights: Tensor | None = None) -> BundleState:
        """One transposed product, and another where weights are given.

        Raises:
          Unsupported: an objective other than the hinge, or several outputs at once.
        """
        rows, outputs = problem.shape
        if not isinstance(problem.objective, Hinge):
            raise Unsupported("bundle: it is for the hinge; use lbfgs for losses without kinks")
        if outputs != 1:
            raise Unsupported(f"bundle: it solves one output at a time, not {outputs}; use one_vs_rest")
        weights, margins = await problem.start(weights)
        first = BundleState(
            weights=weights,
            objective=problem.objective.loss(margins, problem.targets)[0] + problem.penalty(weights)[0],
            gap=1.0,
            iterations=0,
            converged=False,
            margins=margins,
            bound=0.0,
            target=weights,
            normals=weights.new_zeros(1, rows),
            offsets=weights.new_zeros(1),
        )
        return await self._cut(problem, first, *problem.objective.plane(margins, problem.targets, _WIDTH))

    async def step(self, problem: Problem, state: BundleState) -> BundleState:
        hinge = problem.objective
        assert isinstance(hinge, Hinge)
        direction = state.target - state.weights
        change = await problem.margins(direction)
        ahead = state.margins + change
        length = _lowest(hinge, problem.targets, state, direction, change)
        weights = state.weights + length * direction
        margins = state.margins + length * change
        objective = hinge.loss(margins, problem.targets)[0] + problem.penalty(weights)[0]
        moved = replace(
            state, weights=weights, margins=margins, objective=objective, iterations=state.iterations + 1
        )
        return await self._cut(problem, moved, *_plane(hinge, problem.targets, moved, ahead))

    def restored(self, tree: State) -> BundleState:
        return BundleState.from_tree(tree)

    async def _cut(self, problem: Problem, state: BundleState, offset: float, slopes: Tensor) -> BundleState:
        """With one more plane, and the minimum over all of them."""
        normal = await problem.transposed(slopes)
        normals = torch.cat([state.normals, normal.T])
        offsets = torch.cat([state.offsets, state.offsets.new_tensor([offset])])
        shares = over_simplex(normals @ normals.T, offsets)
        target = -(shares @ normals)[:, None]
        bound = float(shares @ offsets) - 0.5 * float((target * target).sum())
        gap = max(0.0, 1 - bound / state.objective)
        normals, offsets = self._kept(shares, normals, offsets)
        return replace(
            state,
            gap=gap,
            converged=gap <= self.tol,
            bound=bound,
            target=target,
            normals=normals,
            offsets=offsets,
        )

    def _kept(self, shares: Tensor, normals: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
        if len(shares) <= self.planes:
            return normals, offsets
        order = shares.argsort(descending=True, stable=True)
        most, rest = order[: self.planes - 1].sort().values, order[self.planes - 1 :]
        weight = shares[rest] / shares[rest].sum()
        merged = (weight @ normals[rest])[None], (weight @ offsets[rest])[None]
        return torch.cat([merged[0], normals[most]]), torch.cat([merged[1], offsets[most]])


def _plane(hinge: Hinge, targets: Tensor, state: BundleState, ahead: Tensor) -> tuple[float, Tensor]:
    """A plane that lifts the minimum of the others.

    Args:
      hinge: the objective.
      targets: of the samples.
      state: with the best weights, and the target for which the other planes were solved.
      ahead: margins at that target.
    """
    offset, slopes = hinge.plane(state.margins, targets, _WIDTH * math.sqrt(state.gap))
    known = float((state.normals @ state.target + state.offsets[:, None]).max())
    if offset + float((slopes * ahead).sum()) - known >= _LIFT * (state.objective - state.bound):
        return offset, slopes
    return hinge.plane(torch.lerp(state.margins, ahead, _BEYOND), targets, _NO_WIDTH)


def _lowest(hinge: Hinge, targets: Tensor, state: BundleState, direction: Tensor, change: Tensor) -> float:
    """How far along the direction the objective is least: its slope, which each kink raises, crosses zero there."""
    short = 1 - (targets * state.margins)[:, 0]
    speed = (targets * change)[:, 0]
    bend = float((direction * direction).sum())
    inside = (short > 0) | ((short == 0) & (speed < 0))
    slope = float((state.weights * direction).sum()) - hinge.C * float(speed[inside].sum())
    if slope >= 0:
        return 0.0
    passed = short * speed > 0
    where, order = (short[passed] / speed[passed]).sort()
    rises = hinge.C * speed[passed].abs()[order].cumsum(0)
    after = slope + rises + bend * where
    crossing = int(torch.searchsorted(after, torch.zeros((), dtype=after.dtype)))
    before = float(rises[crossing - 1]) if crossing else 0.0
    straight = -(slope + before) / bend
    return min(straight, float(where[crossing])) if crossing < len(where) else straight
