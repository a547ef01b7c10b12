"""A device's own samples: a shard of a data set, or of a file."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from typing_extensions import override

from farflung.data import TensorDataset, a9a, covtype
from farflung.errors import ConfigError, DataError, UnknownName
from farflung.files import wrap_read_errors
from farflung.seeding import create_generator

__all__ = ["MAX_FEATURE", "DataShard", "partition_rows", "read_samples"]

MAX_FEATURE = 1e150
"""Largest feature; squares of larger ones may not be finite in float64."""

_DATASETS: dict[str, Callable[[], tuple[TensorDataset, TensorDataset]]] = {
    "a9a": a9a.load,
    "covtype": covtype.load,
}


def partition_rows(rows: int, partitions: int) -> list[slice]:
    """Splits rows into consecutive partitions, of which the first ones may have one row more.

    >>> partition_rows(5, 2)
    [slice(0, 3, None), slice(3, 5, None)]
    """
    size, remainder = divmod(rows, partitions)
    bounds = [part * size + min(part, remainder) for part in range(partitions + 1)]
    return [slice(begin, end) for begin, end in itertools.pairwise(bounds)]


@dataclass(frozen=True, slots=True)
class DataShard:
    """One of several shards of rows of nearly equal size.

    Args:
      number: Number of the shard, from 1.
      num_parts: Number of shards.
      seed: Seed of a shuffle of the rows; ``None`` keeps their order.
    """

    number: int
    num_parts: int
    seed: int | None = None

    @staticmethod
    def parse(text: str, seed: int | None = None) -> DataShard:
        """Parses ``I/K``.

        Raises:
          ConfigError: the text has another form, or there is no such shard.
        """
        match = re.fullmatch(r"(\d{1,9})/(\d{1,9})", text)
        if match is None:
            raise ConfigError(f"part {text!r}: write it as I/K, such as 1/4")
        part = DataShard(int(match[1]), int(match[2]), seed)
        if not 1 <= part.number <= part.num_parts:
            raise ConfigError(f"part {text}: the part must be between 1 and {part.num_parts}")
        return part

    def select_rows(self, count: int) -> Tensor:
        """Selects this shard of a number of rows.

        Raises:
          ConfigError: there are more shards than rows.
        """
        if count < self.num_parts:
            raise ConfigError(f"part {self}: there are {count} rows")
        order = torch.arange(count)
        if self.seed is not None:
            order = torch.randperm(count, generator=create_generator(self.seed, "coded", "parts"))
        return order[partition_rows(count, self.num_parts)[self.number - 1]]

    @override
    def __str__(self) -> str:
        suffix = "" if self.seed is None else f" of seed {self.seed}"
        return f"{self.number}/{self.num_parts}{suffix}"


def read_samples(data: str, part: DataShard | None = None, *, test: bool = False) -> tuple[Tensor, Tensor]:
    """Reads features and labels, float64.

    Args:
      data: ``a9a``, ``covtype``, or the path of a file that ends in ``.npz``, with arrays ``x`` of shape
        (samples, features) and ``y`` of shape (samples,).
      part: Shard of the rows; ``None`` reads all.
      test: True to read the test set, if the data set has one.

    Raises:
      UnknownName: there is no such data set.
      DataError: the data set was not found, or is malformed.
    """
    if data.endswith(".npz"):
        samples, labels = _read(Path(data))
        if part is not None:
            rows = part.select_rows(len(samples))
            samples, labels = samples[rows], labels[rows]
        return samples, labels
    if data not in _DATASETS:
        raise UnknownName("data", data, _DATASETS, "a file ending in .npz")
    dataset = _DATASETS[data]()[test]
    rows = torch.arange(len(dataset)) if part is None else part.select_rows(len(dataset))
    batch = dataset.take(rows, train=False)
    return batch.inputs.to(torch.float64), batch.targets.to(torch.float64)


def _read(path: Path) -> tuple[Tensor, Tensor]:
    with (
        wrap_read_errors(path, "not a file of arrays", DataError),
        np.load(path, allow_pickle=False) as arrays,
    ):
        if missing_arrays := {"x", "y"} - set(arrays.files):
            raise DataError(f"{path}: it has no array {sorted(missing_arrays)[0]!r}; arrays x and y are due")
        x, y = arrays["x"], arrays["y"]
    if x.ndim != 2 or y.shape != x.shape[:1] or not x.size:
        raise DataError(
            f"{path}: x of shape {list(x.shape)} and y of {list(y.shape)}: (samples, features) and (samples,) are due"
        )
    for name, array in (("x", x), ("y", y)):
        if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
            raise DataError(f"{path}: {name} holds something else than finite numbers")
    if np.abs(x).max() > MAX_FEATURE:
        raise DataError(
            f"{path}: x holds numbers above {MAX_FEATURE:g}, whose squares may not be finite: scale them"
        )
    return torch.from_numpy(x.astype(np.float64)), torch.from_numpy(y.astype(np.float64))
