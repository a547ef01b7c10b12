"""Data sets in memory: tensors, subsets, the samples that a replica owns, and their stream."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from typing_extensions import override

from farflung.errors import DataError
from farflung.types import Arrivals, Batch, Dataset, SampleIds, Samples, Stream, StreamContext

__all__ = ["Holding", "InMemory", "Subset", "TensorDataset"]

_NO_ARRIVALS = Arrivals(torch.empty(0, dtype=torch.int64))


class TensorDataset:
    """Data set of two tensors; satisfies :class:`farflung.types.Dataset`.

    Images stay uint8 and text stays in its smallest integer type. ``transform`` turns a batch into floats when it is
    taken, so memory is a quarter of that for floats.

    Args:
      inputs: Tensor with one row per sample.
      targets: Tensor with one row per sample.
      labels: Class of each sample, int64, for partitioners; ``None``: the samples have no classes.
      transform: Function applied to the inputs of every batch, in training and in evaluation.
      augment: Function applied before ``transform`` and only with ``train``; may draw from torch's random state.
      origin: Description of the samples' source, for reports.

    Raises:
      DataError: The tensors have different numbers of samples.

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

    def get_rows(self, ids: SampleIds) -> Batch:
        """Returns the samples ``ids`` as stored."""
        return Batch(self.inputs[ids], self.targets[ids])

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        """Transforms rows; with ``train``, augments them first, with torch's current random state."""
        inputs = rows.inputs
        if train and self.augment is not None:
            inputs = self.augment(inputs)
        if self.transform is not None:
            inputs = self.transform(inputs)
        return Batch(inputs, rows.targets)

    def take(self, ids: SampleIds, *, train: bool) -> Batch:
        """Returns the samples ``ids``, prepared."""
        return self.prepare(self.get_rows(ids), train=train)


class Subset:
    """Subset of a data set, numbered from 0; satisfies :class:`farflung.types.Dataset`.

    Args:
      data: Full data set.
      ids: Ids of its samples in the full set, in order.

    >>> data = TensorDataset(torch.arange(6).reshape(3, 2), torch.tensor([0, 1, 0]))
    >>> Subset(data, torch.tensor([2, 1])).take(torch.tensor([0]), train=False).inputs.tolist()
    [[4, 5]]
    """

    def __init__(self, data: Dataset, ids: SampleIds) -> None:
        self.data, self.ids = data, ids

    @property
    def labels(self) -> Tensor | None:
        """Class of each sample in the full set."""
        return None if self.data.labels is None else self.data.labels[self.ids]

    def __len__(self) -> int:
        return len(self.ids)

    @override
    def __repr__(self) -> str:
        return f"{type(self).__name__}({len(self)} of {self.data!r})"

    def get_rows(self, ids: SampleIds) -> Batch:
        """Returns the samples ``ids`` of the subset, as stored."""
        return self.data.get_rows(self.ids[ids])

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        """Prepares rows as the full set does."""
        return self.data.prepare(rows, train=train)

    def take(self, ids: SampleIds, *, train: bool) -> Batch:
        """Returns the samples ``ids`` of the subset; with ``train``, augmented as in the full set."""
        return self.prepare(self.get_rows(ids), train=train)


class Holding(Subset):
    """Samples that one replica owns, in slots from 0 on; some may have come from other replicas.

    Rows received from another replica are stored. All others are read from the full set. A checkpoint holds only ids,
    so a resumed replica reads all rows from the full set.

    Args:
      data: Full training set.
      ids: Ids of the samples in it, in the order of their slots.

    >>> holding = Holding(TensorDataset(torch.arange(6), torch.zeros(6)), torch.tensor([4, 2]))
    >>> holding.replace_samples(torch.tensor([1]), torch.tensor([5]), Batch(torch.tensor([5]), torch.zeros(1)))
    >>> holding.ids.tolist(), holding.get_rows(torch.tensor([1, 0, 1])).inputs.tolist()
    ([4, 5], [5, 4, 5])
    """

    def __init__(self, data: Dataset, ids: SampleIds) -> None:
        super().__init__(data, ids)
        self.load_ids(ids)

    def load_ids(self, ids: SampleIds) -> None:
        """Sets the owned samples, in this order, all of them from the full set."""
        self.ids = ids.clone()
        self._received_rows: Batch | None = None
        """Rows of samples from other replicas."""
        self._received_index = torch.full_like(self.ids, -1)
        """Index of each slot into the received rows; -1 if the sample is from the full set."""

    def replace_samples(self, slots: SampleIds, ids: SampleIds, rows: Batch) -> None:
        """Replaces the samples in some slots.

        Args:
          slots: Distinct slots.
          ids: Ids of the new samples in the full set.
          rows: Rows of the new samples, as stored.
        """
        earlier = self._received_rows or Batch(rows.inputs[:0], rows.targets[:0])
        row = self._received_index[slots]
        is_new = row < 0
        row[is_new] = torch.arange(len(earlier), len(earlier) + int(is_new.sum()))
        received_rows = Batch(
            torch.cat([earlier.inputs, rows.inputs[is_new]]),
            torch.cat([earlier.targets, rows.targets[is_new]]),
        )
        received_rows.inputs[row], received_rows.targets[row] = rows.inputs, rows.targets
        self.ids[slots], self._received_index[slots], self._received_rows = ids, row, received_rows

    @override
    def get_rows(self, ids: SampleIds) -> Batch:
        """Returns the rows at the slots ``ids``, received ones included."""
        row = self._received_index[ids]
        is_received = row >= 0
        if self._received_rows is None or not is_received.any():
            return super().get_rows(ids)
        base_rows = super().get_rows(ids[~is_received])
        order = torch.cat([(~is_received).nonzero(), is_received.nonzero()]).flatten().argsort()
        return Batch(
            torch.cat([base_rows.inputs, self._received_rows.inputs[row[is_received]]])[order],
            torch.cat([base_rows.targets, self._received_rows.targets[row[is_received]]])[order],
        )


class InMemory(Stream):
    """Stream of a data set in memory: all samples are always available, and the sampler's cursor is the position."""

    has_random_access = True

    @override
    def start(self, context: StreamContext) -> Samples:
        return context.data

    @override
    def poll(self, time_s: float, step: int) -> Arrivals:
        del time_s, step
        return _NO_ARRIVALS
