"""Covertype: 581,012 patches of forest, 54 columns, 7 kinds of trees.

A fifth of the rows, chosen at random from a fixed seed, are the test set; both sets keep the order of the file,
which goes by area, so that a split by order is unlike from part to part. Read from the official
``covtype.data.gz`` or from ``covtype.csv.gz``, the same rows below a line of names.

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
from farflung.files import reading
from farflung.seeding import derive

__all__ = ["SOURCE", "Standardize", "load", "read"]

SOURCE = CATALOG["covtype"]

_COLUMNS, _MEASURED, _CLASSES = 54, 10, 7
_SPLIT_SEED = 0


@dataclass(frozen=True, slots=True, eq=False)
class Standardize:
    """The measured columns at zero mean and unit spread, the yes-or-no ones as they are.

    Args:
      mean: of each column, 0 where it stays.
      std: of each column, 1 where it stays.
    """

    mean: Tensor
    std: Tensor

    def __call__(self, rows: Tensor) -> Tensor:
        """``rows`` of shape ``(n, 54)`` as float32."""
        return (rows.to(torch.float32) - self.mean) / self.std


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set; columns 0 to 9 are standardised by the training rows.

    Raises:
      DataError: absent, truncated or altered file.
    """
    found = locate(SOURCE)
    if found.names == (SOURCE.files[0].name,):
        verify(found.path(found.names[0]), SOURCE.files[0])
    return read(found, count=581_012)


def read(found: Location, *, count: int) -> tuple[TensorDataset, TensorDataset]:
    """Reads the file in ``found``; ``count`` rows there must be.

    Raises:
      DataError: truncated, or rows that are not what they should be.
    """
    path = found.path(found.names[0])
    header = 0 if found.names == (SOURCE.files[0].name,) else 1
    with reading(path, "not a table of whole numbers, or truncated", DataError):
        table = np.loadtxt(path, dtype=np.int16, delimiter=",", skiprows=header, ndmin=2)
    if table.shape != (count, _COLUMNS + 1):
        raise DataError(
            f"{path}: expected {count} rows of {_COLUMNS + 1} columns, found {table.shape[0]} of {table.shape[1]}"
        )
    kinds = table[:, -1]
    if count and not (kinds.min() >= 1 and kinds.max() <= _CLASSES):
        raise DataError(f"{path}: expected kinds 1 to 7, found {kinds.min()} to {kinds.max()}")
    random = np.random.RandomState(derive(_SPLIT_SEED, "covtype") & 0xFFFFFFFF)
    held_out = np.zeros(count, dtype=bool)
    held_out[random.permutation(count)[: count // 5]] = True
    rows = torch.from_numpy(np.ascontiguousarray(table[:, :-1]))
    labels = torch.from_numpy(kinds.astype(np.int64) - 1)
    train, test = (torch.from_numpy(np.flatnonzero(mask)) for mask in (~held_out, held_out))
    mean, std = torch.zeros(_COLUMNS), torch.ones(_COLUMNS)
    measured = rows[train, :_MEASURED].to(torch.float64)
    mean[:_MEASURED] = measured.mean(dim=0).to(torch.float32)
    std[:_MEASURED] = measured.std(dim=0).clamp(min=1e-9).to(torch.float32)
    scale = Standardize(mean, std)
    origin = f"covtype, {found.folder}"
    return (
        TensorDataset(rows[train], labels[train], labels[train], transform=scale, origin=origin),
        TensorDataset(rows[test], labels[test], labels[test], transform=scale, origin=origin),
    )
