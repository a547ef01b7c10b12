"""A small quadratic program over the simplex."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["over_simplex"]

_ROUNDS = 100
_CLOSE = 1e-15
_BACK_OFF = 0.995


def over_simplex(matrix: Tensor, offsets: Tensor) -> Tensor:
    r"""The shares that minimise a convex quadratic form.

    .. math:: \min_a \tfrac{1}{2} a^T G a - b^T a \quad \text{with } a \ge 0,\ \textstyle\sum_j a_j = 1

    A primal-dual interior-point method with predictor and corrector: some twenty Cholesky factorisations, whatever the
    condition of G, down to rounding errors.

    Args:
      matrix: G, symmetric and positive semidefinite.
      offsets: b.

    References: Mehrotra 1992; Nocedal & Wright 2006, alg. 16.4.
    """
    scale = max(float(matrix.diagonal().max()), float(offsets.abs().max()))
    if scale == 0:
        return torch.full_like(offsets, 1 / len(offsets))
    matrix, offsets = matrix / scale, offsets / scale
    shares = torch.full_like(offsets, 1 / len(offsets))
    gradient = matrix @ shares - offsets
    level = float(gradient.min()) - max(1e-3, float(gradient.max() - gradient.min()))
    slacks = gradient - level
    for _ in range(_ROUNDS):
        off = matrix @ shares - offsets - level - slacks
        excess = float(shares.sum()) - 1
        product = float(shares @ slacks) / len(shares)
        if product < _CLOSE and float(off.abs().max()) < _CLOSE:
            break
        factor, failed = torch.linalg.cholesky_ex(matrix + torch.diag(slacks / shares))
        if int(failed):
            break
        newton = _Newton(factor, shares, slacks, off, excess)
        way = newton.towards(shares * slacks)
        reach = min(_reach(shares, way[0]), 1.0), min(_reach(slacks, way[2]), 1.0)
        predicted = float((shares + reach[0] * way[0]) @ (slacks + reach[1] * way[2])) / len(shares)
        centring = (predicted / product) ** 3 * product
        way = newton.towards(shares * slacks + way[0] * way[2] - centring)
        length = min(1.0, _BACK_OFF * min(_reach(shares, way[0]), _reach(slacks, way[2])))
        shares, level, slacks = shares + length * way[0], level + length * way[1], slacks + length * way[2]
    return shares / shares.sum()


class _Newton:
    """The linear equations of one round, factored once for predictor and corrector."""

    def __init__(self, factor: Tensor, shares: Tensor, slacks: Tensor, off: Tensor, excess: float) -> None:
        self._factor, self._shares, self._slacks = factor, shares, slacks
        self._off, self._excess = off, excess
        self._ones = self._solve(torch.ones_like(shares))

    def _solve(self, right: Tensor) -> Tensor:
        return torch.cholesky_solve(right[:, None], self._factor)[:, 0]

    def towards(self, products: Tensor) -> tuple[Tensor, float, Tensor]:
        """The change of shares, level and slacks that takes these products of shares and slacks to zero."""
        free = self._solve(-self._off - products / self._shares)
        level = (-self._excess - float(free.sum())) / float(self._ones.sum())
        shares = free + level * self._ones
        return shares, level, -(products + self._slacks * shares) / self._shares


def _reach(values: Tensor, way: Tensor) -> float:
    """How far along the way the values stay positive."""
    falling = way < 0
    return float((-values[falling] / way[falling]).min()) if bool(falling.any()) else float("inf")
