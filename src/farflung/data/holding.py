"""The samples that one replica holds, some of which may have come from others."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import override

from farflung.types import Batch, Dataset, SampleIds

__all__ = ["Holding"]


class Holding:
    """A replica's own samples, each in a place from 0 on; satisfies :class:`farflung.types.Dataset` by places.

    A sample that has come from another replica is kept as it came. All others are read from the whole, where a resumed
    replica finds those that had come, too: its checkpoint holds their ids alone.

    Args:
      data: the whole training set.
      ids: of the samples in it, in the order of their places.

    >>> from farflung.data import TensorDataset
    >>> held = Holding(TensorDataset(torch.arange(6), torch.zeros(6)), torch.tensor([4, 2]))
    >>> held.exchange(torch.tensor([1]), torch.tensor([5]), Batch(torch.tensor([5]), torch.zeros(1)))
    >>> held.ids.tolist(), held.rows(torch.tensor([1, 0, 1])).inputs.tolist()
    ([4, 5], [5, 4, 5])
    """

    def __init__(self, data: Dataset, ids: SampleIds) -> None:
        self.data = data
        self.load_ids(ids)

    @property
    def labels(self) -> Tensor | None:
        """Class of each sample, as the whole has it."""
        return None if self.data.labels is None else self.data.labels[self.ids]

    def __len__(self) -> int:
        return len(self.ids)

    @override
    def __repr__(self) -> str:
        return f"Holding({len(self)} of {self.data!r})"

    def load_ids(self, ids: SampleIds) -> None:
        """Holds these samples from now on, in this order, all of them from the whole."""
        self.ids = ids.clone()
        self._came: Batch | None = None
        """The rows of samples from others."""
        self._row = torch.full_like(self.ids, -1)
        """Of each place, which of these rows; -1 where the sample is from the whole."""

    def exchange(self, places: SampleIds, ids: SampleIds, rows: Batch) -> None:
        """Other samples stand in some places from now on.

        Args:
          places: unlike ones.
          ids: of the samples, in the whole.
          rows: theirs, as stored.
        """
        before = self._came or Batch(rows.inputs[:0], rows.targets[:0])
        row = self._row[places]
        new = row < 0
        row[new] = torch.arange(len(before), len(before) + int(new.sum()))
        came = Batch(
            torch.cat([before.inputs, rows.inputs[new]]), torch.cat([before.targets, rows.targets[new]])
        )
        came.inputs[row], came.targets[row] = rows.inputs, rows.targets
        self.ids[places], self._row[places], self._came = ids, row, came

    def rows(self, ids: SampleIds) -> Batch:
        """The samples in these places, as stored."""
        row = self._row[ids]
        came = row >= 0
        if self._came is None or not came.any():
            return self.data.rows(self.ids[ids])
        own = self.data.rows(self.ids[ids[~came]])
        order = torch.cat([(~came).nonzero(), came.nonzero()]).flatten().argsort()
        return Batch(
            torch.cat([own.inputs, self._came.inputs[row[came]]])[order],
            torch.cat([own.targets, self._came.targets[row[came]]])[order],
        )

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        """As in the whole."""
        return self.data.prepare(rows, train=train)

    def take(self, ids: SampleIds, *, train: bool) -> Batch:
        """The samples in these places; with ``train``, augmented as in the whole."""
        return self.prepare(self.rows(ids), train=train)
