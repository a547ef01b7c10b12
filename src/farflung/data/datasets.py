"""Samples in memory: what loaders return, a part of a data set, one that changes during a run; and their stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from farflung.errors import DataError
from farflung.types import Arrivals, Batch, Dataset, Feed, SampleIds, Samples, Stream

__all__ = ["Holding", "InMemory", "Subset", "TensorDataset"]

_NOTHING = Arrivals(torch.empty(0, dtype=torch.int64))


class TensorDataset:
    """Samples held in two tensors; satisfies :class:`farflung.types.Dataset`.

    Images stay uint8 and text stays in its smallest integer type; ``transform`` turns a batch into floats when it
    is taken, so memory holds a quarter of what floats would need.

    Args:
      inputs: one row per sample.
      targets: one row per sample.
      labels: class of each sample, int64, for partitioners; ``None`` where there are no classes.
      transform: applied to the inputs of every batch, in training and in evaluation.
      augment: applied before ``transform`` and only with ``train``; may draw from torch's global random state.
      origin: where the samples came from, in words, for reports.

    Raises:
      DataError: the tensors disagree about the number of samples.

    >>> data = TensorDataset(torch.arange(6).reshape(3, 2), torch.tensor([0, 1, 0]))
    >>> data.take(torch.tensor([2, 0]), train=False).inputs.tolist()
    [[4, 5], [0, 1]]
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        labels: Tensor | None = None,
        transform: Callable[[Tensor], Tensor] | None = None,
        augment: Callable[[Tensor], Tensor] | None = None,
        *,
        origin: str = "memory",
    ) -> None:
        counts = {len(inputs), len(targets)} | (set() if labels is None else {len(labels)})
        if len(counts) != 1:
            raise DataError(
                f"{origin}: {len(inputs)} inputs, {len(targets)} targets"
                + ("" if labels is None else f", {len(labels)} labels")
                + ": each sample needs one of each"
            )
        self.inputs = inputs
        self.targets = targets
        self.labels = None if labels is None else labels.to(torch.int64)
        self.transform = transform
        self.augment = augment
        self.origin = origin

    def __len__(self) -> int:
        return len(self.targets)

    @override
    def __repr__(self) -> str:
        return f"TensorDataset({len(self)} samples of {tuple(self.inputs.shape[1:])}, {self.origin})"

    def rows(self, ids: SampleIds) -> Batch:
        """The samples ``ids`` as stored."""
        return Batch(self.inputs[ids], self.targets[ids])

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        """Transformed; with ``train``, augmented before by what torch's current random state draws."""
        inputs = rows.inputs
        if train and self.augment is not None:
            inputs = self.augment(inputs)
        if self.transform is not None:
            inputs = self.transform(inputs)
        return Batch(inputs, rows.targets)

    def take(self, ids: SampleIds, *, train: bool) -> Batch:
        """The samples ``ids``, prepared."""
        return self.prepare(self.rows(ids), train=train)


class Subset:
    """Some samples of a data set, numbered from 0; satisfies :class:`farflung.types.Dataset` itself.

    Args:
      data: the whole.
      ids: which of its samples, in this order.

    >>> whole = TensorDataset(torch.arange(6).reshape(3, 2), torch.tensor([0, 1, 0]))
    >>> Subset(whole, torch.tensor([2, 1])).take(torch.tensor([0]), train=False).inputs.tolist()
    [[4, 5]]
    """

    def __init__(self, data: Dataset, ids: SampleIds) -> None:
        self.data, self.ids = data, ids

    @property
    def labels(self) -> Tensor | None:
        """Class of each sample, as the whole has it."""
        return None if self.data.labels is None else self.data.labels[self.ids]

    def __len__(self) -> int:
        return len(self.ids)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of {self.data!r})"

    def rows(self, ids: SampleIds) -> Batch:
        """The samples that are ``ids`` here, as stored."""
        return self.data.rows(self.ids[ids])

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        """Rows, prepared as in the whole."""
        return self.data.prepare(rows, train=train)

    def take(self, ids: SampleIds, *, train: bool) -> Batch:
        """The samples that are ``ids`` here; with ``train``, augmented as in the whole."""
        return self.prepare(self.rows(ids), train=train)


class Holding(Subset):
    """The samples that one replica holds, each in a place from 0 on, some of which may have come from others.

    A sample that has come from another replica is kept as it came. All others are read from the whole, where a resumed
    replica finds those that had come, too: its checkpoint holds their ids alone.

    Args:
      data: the whole training set.
      ids: of the samples in it, in the order of their places.

    >>> held = Holding(TensorDataset(torch.arange(6), torch.zeros(6)), torch.tensor([4, 2]))
    >>> held.exchange(torch.tensor([1]), torch.tensor([5]), Batch(torch.tensor([5]), torch.zeros(1)))
    >>> held.ids.tolist(), held.rows(torch.tensor([1, 0, 1])).inputs.tolist()
    ([4, 5], [5, 4, 5])
    """

    def __init__(self, data: Dataset, ids: SampleIds) -> None:
        super().__init__(data, ids)
        self.load_ids(ids)

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

    @override
    def rows(self, ids: SampleIds) -> Batch:
        row = self._row[ids]
        came = row >= 0
        if self._came is None or not came.any():
            return super().rows(ids)
        own = super().rows(ids[~came])
        order = torch.cat([(~came).nonzero(), came.nonzero()]).flatten().argsort()
        return Batch(
            torch.cat([own.inputs, self._came.inputs[row[came]]])[order],
            torch.cat([own.targets, self._came.targets[row[came]]])[order],
        )


class InMemory(Stream):
    """All of the data set at any time; nothing arrives, nothing is kept back: the sampler's cursor is the position."""

    everything = True

    @override
    def open(self, feed: Feed) -> Samples:
        return feed.data

    @override
    def poll(self, now: float, step: int) -> Arrivals:
        del now, step
        return _NOTHING
