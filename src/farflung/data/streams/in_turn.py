"""Which sample of a data set comes next, for sources that send it over and over."""

from __future__ import annotations

import torch

from farflung.seeding import Passes, derive
from farflung.types import Batch, Dataset, SampleIds, Samples

__all__ = ["in_turn"]


def in_turn(data: Dataset, rank: int, size: int, *, shared: bool, seed: int) -> Samples:
    r"""The samples that a source sends to one of ``size`` replicas, by their number, in shuffled passes without an end.

    Args:
      data: what is sent.
      rank: to whom.
      size: number of replicas.
      shared: whether all of them get parts of ``data``; they then take turns: of each pass over it, replica :math:`i`
        of :math:`n` gets the positions :math:`i, i + n, i + 2n, \dots`. Otherwise it is this one's share.
      seed: of the run.
    """
    if shared:
        return _InTurn(data, Passes(derive(seed, "stream")), rank, size)
    return _InTurn(data, Passes(derive(seed, "stream", rank)), 0, 1)


class _InTurn:
    """The samples of a data set in shuffled passes, of which every so-manyth is this replica's.

    Args:
      data: the whole.
      passes: their orders.
      first: position of this replica's first sample.
      stride: from one of its positions to the next.
    """

    def __init__(self, data: Dataset, passes: Passes, first: int, stride: int) -> None:
        self._data, self._passes, self._first, self._stride = data, passes, first, stride

    def rows(self, ids: SampleIds) -> Batch:
        n = len(self._data)
        positions = self._first + self._stride * ids
        found = torch.empty_like(positions)
        for index in torch.unique(positions // n).tolist():
            here = positions // n == index
            found[here] = self._passes.order(index, n)[positions[here] % n]
        return self._data.rows(found)

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        return self._data.prepare(rows, train=train)
