"""Blocks made of blocks: a combination of blocks has the same combination of their rows."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import Tensor

from farflung.coded.plan import raw_partition
from farflung.coded.span import TOLERANCE, Span

__all__ = ["combination"]

Index = TypeVar("Index", bound=Hashable)

_MOST_SETS = 2000
"""Sets of coded blocks that are compared; where there are more, one is taken greedily."""
_EXACT = 1e-9
"""Of the target's largest coefficient: what a combination may differ from it by."""
_ROUNDING = 1e-12
"""Of the terms of a coefficient: what is left of them where they cancel."""


def combination(
    target: Tensor, rows: Mapping[Index, Tensor], costs: Mapping[Index, float] | None = None
) -> dict[Index, float] | None:
    """The blocks, and their coefficients, whose sum is the block of a wanted row; few and cheap ones.

    Raw blocks give what they can. Partitions whose raw block is gone take coded ones: all sets of at most as many as
    partitions are gone are compared, by their cost together with that of the raw blocks that they need beside them,
    then by their number, then by how much they magnify errors. A copy of the wanted block is found as well. Where there
    are more than 2000 sets, one is taken greedily.

    Args:
      target: (K,), float64; a unit vector for the repair of a raw block.
      rows: (K,) of the blocks at hand; a partition is gone where none of them is its raw block.
      costs: of fetching each block, for example 0 for those that the device holds; 1 for each that is not named.

    Returns:
      Coefficients other than 0, or ``None`` where the blocks at hand do not make such a block.
    """
    price = {index: 1.0 if costs is None else costs.get(index, 1.0) for index in rows}
    raw: dict[int, Index] = {}
    coded: list[Index] = []
    for index in sorted(rows, key=price.__getitem__):
        partition = raw_partition(rows[index])
        if partition is None:
            coded.append(index)
        else:
            raw.setdefault(partition, index)
    raw_price = torch.tensor([price[raw[k]] if k in raw else 0.0 for k in range(len(target))])
    gone = torch.tensor([k for k in range(len(target)) if k not in raw], dtype=torch.int64)
    best: tuple[float, int, float] = (math.inf, 0, 0.0)
    found: dict[Index, float] | None = None
    matrix = torch.stack([rows[index] for index in coded]) if coded else target.new_zeros(0, len(target))
    coded_price = torch.tensor([price[index] for index in coded])
    for sets in _sets(matrix, coded_price + (matrix != 0).double() @ raw_price.double(), gone):
        factors, rest, valid = _solved(target, matrix[sets], gone)
        total = (rest != 0).double() @ raw_price.double() + (factors != 0).double().mul(
            coded_price[sets]
        ).sum(1)
        magnified = (factors.abs() * matrix[sets].norm(dim=2)).sum(1)
        for place in valid.nonzero()[:, 0].tolist():
            rank_of = (float(total[place]), sets.shape[1], float(magnified[place]))
            if rank_of < best:
                best = rank_of
                pairs = [(raw[k], float(rest[place, k])) for k in sorted(raw)]
                pairs += [(coded[j], float(f)) for j, f in zip(sets[place], factors[place], strict=True)]
                found = {index: factor for index, factor in pairs if factor}
    return found


def _sets(matrix: Tensor, prices: Tensor, gone: Tensor) -> Iterator[Tensor]:
    """Sets of coded blocks, (sets, size) for each size from 0 on."""
    yield torch.zeros(1, 0, dtype=torch.int64)
    largest = min(max(1, len(gone)), len(matrix))
    if sum(math.comb(len(matrix), size) for size in range(1, largest + 1)) <= _MOST_SETS:
        for size in range(1, largest + 1):
            yield torch.tensor(list(itertools.combinations(range(len(matrix)), size)))
    else:
        span = Span(len(gone))
        order = prices.argsort(stable=True).tolist()
        yield torch.tensor([[j for j in order if span.add(matrix[j, gone])]])


def _solved(target: Tensor, blocks: Tensor, gone: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """For each set of coded blocks their factors, what raw blocks have to add, and whether that makes the target.

    Args:
      target: (K,).
      blocks: (sets, size, K).
      gone: the partitions that no raw block gives.
    """
    columns = (
        gone if len(gone) else torch.arange(len(target))
    )  # without need of coded ones, only copies are of use
    wanted = target[columns].expand(len(blocks), 1, -1)
    factors = (wanted @ torch.linalg.pinv(blocks[:, :, columns], rtol=TOLERANCE))[:, 0]
    terms = factors[:, :, None] * blocks
    rest = target - terms.sum(1)
    rest[rest.abs() <= _ROUNDING * (target.abs() + terms.abs().sum(1))] = 0
    factors = torch.where(factors.abs() <= _ROUNDING * factors.abs().sum(1, keepdim=True), 0.0, factors)
    left = rest[:, gone].abs().sum(1)
    rest[:, gone] = 0
    magnified = (factors.abs() * blocks.norm(dim=2)).sum(1)
    valid = (left <= _EXACT * target.abs().amax()) & (magnified * TOLERANCE <= target.norm())
    return factors, rest, valid
