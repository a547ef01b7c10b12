"""How many blocks may vanish before the partitions are lost."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from farflung.coded.plan import raw_partition
from farflung.coded.span import TOLERANCE, Span, unit

__all__ = ["any_one_may_vanish", "rank", "redundancy", "would_decode"]

_AT_ONCE = 4096
"""Sets that are tried in one call."""


def rank(rows: Iterable[Tensor], partitions: int) -> int:
    """The rank of rows of coefficients, numeric as :class:`farflung.coded.Decoder` counts it.

    Args:
      rows: (partitions,) each, float64; there may be none.
      partitions: K.
    """
    span = Span(partitions)
    for row in rows:
        span.add(row)
    return span.rank


def would_decode(rows: Iterable[Tensor], partitions: int) -> bool:
    """Whether answers of these rows determine all partitions."""
    return rank(rows, partitions) == partitions


def any_one_may_vanish(rows: Sequence[Tensor], partitions: int) -> bool:
    r"""Whether the rest determines all partitions whichever row vanishes; O(N K^2).

    With Q an orthonormal basis of the columns, the rest has smallest singular value :math:`\sqrt{1 - \|Q_i\|^2}` there
    without row i.
    """
    if len(rows) <= partitions or not would_decode(rows, partitions):
        return False
    q, _ = torch.linalg.qr(unit(torch.stack(list(rows))))
    leverage = q.square().sum(dim=1)
    return bool((1 - leverage > TOLERANCE**2).all())


def redundancy(
    rows: Sequence[Tensor], partitions: int, *, enough: int | None = None, most_sets: int = 25_000
) -> int:
    """How many rows may vanish, whichever they are, so that the rest determines all partitions.

    All sets of 1, 2, ... rows are tried, until one is found without which the rest does not decode. The result is exact
    where that takes at most ``most_sets`` sets: always with 20 rows of which 4 are coded, up to 2 with 50 rows. Beyond,
    it is a lower bound: all sets of so many have been tried.

    Args:
      rows: (partitions,) each, float64.
      partitions: K.
      enough: where more need not be known, up to how many is tried.
      most_sets: how many sets are tried.

    Returns:
      At least 0, or -1 where the rows do not determine all partitions as they are.
    """
    if not would_decode(rows, partitions):
        return -1
    raw: set[int] = set()
    coded = []
    for row in rows:
        partition = raw_partition(row)
        if partition is None or partition in raw:
            coded.append(unit(row))
        else:
            raw.add(partition)
    matrix = torch.stack(coded) if coded else torch.zeros(0, partitions, dtype=torch.float64)
    # Without the rows that have a partition, nothing is known of it.
    fewest = min(int(count) for count in (torch.stack(list(rows)) != 0).sum(dim=0))
    most = min(fewest - 1, len(rows) - partitions, *([] if enough is None else [enough]))
    tried = 0
    for vanished in range(1, most + 1):
        tried += math.comb(len(rows), vanished)
        if tried > most_sets or not _decodes_without(matrix, sorted(raw), partitions, vanished):
            return vanished - 1
    return most


def _decodes_without(coded: Tensor, raw: list[int], partitions: int, vanished: int) -> bool:
    """Whether the rest decodes whichever rows vanish: the coded ones left are of full rank in the columns whose raw
    rows are not there.
    """
    gone = [k for k in range(partitions) if k not in raw]
    for raws in range(min(vanished, len(raw)) + 1):
        left = len(coded) - (vanished - raws)
        columns = len(gone) + raws
        if left < 0 or not columns:
            continue
        if left < columns:
            return False
        kept = torch.tensor(list(itertools.combinations(range(len(coded)), left)))
        for some in _chunks(itertools.combinations(raw, raws), max(1, _AT_ONCE // len(kept))):
            places = torch.tensor([[*gone, *others] for others in some])
            blocks = coded[:, places].movedim(0, 1)[:, kept]  # (raw sets, coded sets, left, columns)
            if not bool((torch.linalg.svdvals(blocks)[..., -1] > TOLERANCE).all()):
                return False
    return True


def _chunks(sets: Iterable[tuple[int, ...]], length: int) -> Iterator[list[tuple[int, ...]]]:
    rest = iter(sets)
    while chunk := list(itertools.islice(rest, length)):
        yield chunk
