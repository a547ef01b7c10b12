"""Covertype: 581,012 patches of forest, 54 columns, 7 kinds of trees.

A fifth of the rows, chosen at random from a fixed seed, are the test set. Both sets keep the order of the file, which
goes by area, so the parts of a split by order differ. Read from the official ``covtype.data.gz`` or from
``covtype.csv.gz``, equal rows below a line of names.

Reference: Blackard & Dean, "Comparative accuracies of artificial neural networks and discriminant analysis", 1999.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farflung.data.catalog import CATALOG
from farflung.data.datasets import TensorDataset
from farflung.data.source import Location, locate, verify
from farflung.errors import DataError
from farflung.files import wrap_read_errors
from farflung.seeding import derive_seed

__all__ = ["SOURCE", "Standardize", "load", "read"]

SOURCE = CATALOG["covtype"]

_COLUMNS, _NUM_MEASURED, _CLASSES = 54, 10, 7
_SPLIT_SEED = 0


@dataclass(frozen=True, slots=True, eq=False)
class Standardize:
    """Transform of measured columns to zero mean and unit spread; binary columns are unchanged.

    Args:
      mean: Mean of each column, 0 for unchanged ones.
      std: Standard deviation of each column, 1 for unchanged ones.
    """

    mean: Tensor
    std: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """Returns ``rows`` of shape ``(n, 54)`` as standardised float32."""
        return (rows.to(torch.float32) - self.mean) / self.std


def load() -> tuple[TensorDataset, TensorDataset]:
    """Loads training and test set; columns 0 to 9 are standardised by the training rows.

    Raises:
      DataError: The file is absent, truncated or altered.
    """
    location = locate(SOURCE)
    if location.names == (SOURCE.files[0].name,):
        verify(location.get_path(location.names[0]), SOURCE.files[0])
    return read(location, count=581_012)


def read(location: Location, *, count: int) -> tuple[TensorDataset, TensorDataset]:
    """Reads the file at ``location``, which must have ``count`` rows.

    Raises:
      DataError: The file is truncated, or has unexpected rows.
    """
    path = location.get_path(location.names[0])
    header = 0 if location.names == (SOURCE.files[0].name,) else 1
    with wrap_read_errors(path, "not a table of whole numbers, or truncated", DataError):
        table = np.loadtxt(path, dtype=np.int16, delimiter=",", skiprows=header, ndmin=2)
    if table.shape != (count, _COLUMNS + 1):
        raise DataError(
            f"{path}: expected {count} rows of {_COLUMNS + 1} columns, found {table.shape[0]} of {table.shape[1]}"
        )
    kinds = table[:, -1]
    if count and not (kinds.min() >= 1 and kinds.max() <= _CLASSES):
        raise DataError(f"{path}: expected kinds 1 to 7, found {kinds.min()} to {kinds.max()}")
    random = np.random.RandomState(derive_seed(_SPLIT_SEED, "covtype") & 0xFFFFFFFF)
    held_out = np.zeros(count, dtype=bool)
    held_out[random.permutation(count)[: count // 5]] = True
    rows = torch.from_numpy(np.ascontiguousarray(table[:, :-1]))
    labels = torch.from_numpy(kinds.astype(np.int64) - 1)
    train, test = (torch.from_numpy(np.flatnonzero(mask)) for mask in (~held_out, held_out))
    mean, std = torch.zeros(_COLUMNS), torch.ones(_COLUMNS)
    measured_rows = rows[train, :_NUM_MEASURED].to(torch.float64)
    mean[:_NUM_MEASURED] = measured_rows.mean(dim=0).to(torch.float32)
    std[:_NUM_MEASURED] = measured_rows.std(dim=0).clamp(min=1e-9).to(torch.float32)
    scale = Standardize(mean, std)
    origin = f"covtype, {location.folder}"
    return (
        TensorDataset(rows[train], labels[train], labels[train], transform=scale, origin=origin),
        TensorDataset(rows[test], labels[test], labels[test], transform=scale, origin=origin),
    )
