"""Rank of rows of coefficients, and how many devices may vanish before it is too low."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from farflung.coded.decoding import TOLERANCE, Span, raw_partition, unit

__all__ = ["MOST_SETS", "missing_ranks", "rank", "redundancy"]

MOST_SETS = 33_000
"""Sets of losses that are tried: all pairs of 256 devices, for example."""
_AT_ONCE = 4096
"""Sets that are tried in one call."""


def rank(rows: Iterable[Tensor], partitions: int) -> int:
    """Computes the rank of rows of coefficients, numeric as :class:`farflung.coded.Decoder` counts it.

    Args:
      rows: (partitions,) each, float64; there may be none.
      partitions: K.
    """
    span = Span(partitions)
    for row in rows:
        span.add(row)
    return span.rank


def redundancy(
    rows: Sequence[Tensor],
    partitions: int,
    *,
    holders: Sequence[Hashable] | None = None,
    enough: int | None = None,
    most_sets: int = MOST_SETS,
) -> int:
    """Computes how many holders may vanish, in the worst case, so that the rest determines all partitions.

    The result is exact where that takes at most ``most_sets`` sets: always with 20 rows of which 4 are coded, up to 2
    with 256 rows. Beyond, it is a lower bound: all sets of so many losses have been tried.

    Args:
      rows: (partitions,) each, float64.
      partitions: K.
      holders: the holder of each row; ``None``: each row has its own.
      enough: the most losses that are tried; ``None``: those of all holders.
      most_sets: the most sets that are tried.

    Returns:
      At least 0, or -1 where the rows as they are do not determine all partitions.
    """
    matrix = torch.stack(list(rows)) if len(rows) else torch.zeros(0, partitions, dtype=torch.float64)
    losses = -1
    for losses, missing in enumerate(missing_ranks(matrix, holders, enough=enough, most_sets=most_sets)):
        if missing:
            return losses - 1
    return losses


def missing_ranks(
    matrix: Tensor,
    holders: Sequence[Hashable] | None = None,
    *,
    enough: int | None = None,
    most_sets: int = MOST_SETS,
) -> Iterator[int]:
    """Yields the missing rank without losses, then after losses of one holder, of two, and so on, each summed over all
    sets of so many holders.

    A set costs a matrix of the coded rows by those partitions whose raw rows are lost: all other raw rows are known.

    Args:
      matrix: (rows, partitions), float64.
      holders: the holder of each row; ``None``: each row has its own.
      enough: the most losses that are tried; ``None``: those of all holders.
      most_sets: the most sets that are tried in all; a number of losses that would exceed it is not begun.
    """
    holders = range(len(matrix)) if holders is None else holders
    raw: dict[int, int] = {}
    coded: list[int] = []
    for place, row in enumerate(matrix):
        partition = raw_partition(row)
        if partition is None or partition in raw:
            coded.append(place)
        else:
            raw[partition] = place
    gone = [k for k in range(matrix.shape[1]) if k not in raw]
    raw_of: dict[Hashable, list[int]] = {holder: [] for holder in holders}
    for k, place in raw.items():
        raw_of[holders[place]].append(k)
    numbers = {holder: number for number, holder in enumerate(raw_of)}
    held_by = torch.tensor([numbers[holders[place]] for place in coded], dtype=torch.int64)
    rows, tried = unit(matrix[coded]), -1  # without losses there is no set
    for losses in range(1 + (len(raw_of) if enough is None else min(enough, len(raw_of)))):
        tried += math.comb(len(raw_of), losses)
        if tried > most_sets:
            return
        # Only sets that lose as many raw rows fit into one tensor.
        by_width: dict[int, list[tuple[list[int], list[int]]]] = {}
        for some in itertools.combinations(raw_of, losses):
            columns = [*gone, *itertools.chain.from_iterable(raw_of[holder] for holder in some)]
            lost = [numbers[holder] for holder in some]
            by_width.setdefault(len(columns), []).append((lost, columns))
        yield sum(
            _missing(rows, held_by, sets[begin : begin + _AT_ONCE])
            for sets in by_width.values()
            for begin in range(0, len(sets), _AT_ONCE)
        )


def _missing(rows: Tensor, held_by: Tensor, sets: Sequence[tuple[list[int], list[int]]]) -> int:
    """Sums the ranks that the remaining holders' coded rows lack in the columns that no raw row gives.

    Args:
      rows: (coded, partitions), each of length 1.
      held_by: (coded,), the number of each row's holder.
      sets: numbers of the holders that are lost, and as many columns in each set.
    """
    lost, columns = (torch.tensor(numbers, dtype=torch.int64) for numbers in zip(*sets, strict=True))
    stays = (held_by[:, None] != lost[:, None]).all(dim=2)
    blocks = rows[:, columns].movedim(0, 1) * stays[:, :, None]  # (sets, coded, columns)
    return columns.numel() - int((torch.linalg.svdvals(blocks) > TOLERANCE).sum())
