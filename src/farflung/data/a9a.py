"""a9a: 32,561 + 16,281 people of the census of 1994, 123 yes-or-no columns, and whether they earned over $50,000.

The Adult data set as LIBSVM publishes it: measured columns are cut at their quintiles, so every entry is 0 or 1. Read
from the official text files ``a9a`` and ``a9a.t``, or from these packed by gzip or bzip2.

References: Kohavi, "Scaling up the accuracy of naive-Bayes classifiers", 1996; Platt, "Fast training of support vector
machines using sequential minimal optimization", 1998, for the columns.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from farflung.data.archive import content
from farflung.data.catalog import CATALOG
from farflung.data.datasets import TensorDataset
from farflung.data.source import Location, locate
from farflung.errors import DataError

__all__ = ["SOURCE", "as_float", "load", "read"]

SOURCE = CATALOG["a9a"]


_COLUMNS = 123


def as_float(rows: Tensor) -> Tensor:
    """``rows`` of shape ``(n, 123)`` as float32."""
    return rows.to(torch.float32)


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set; targets are -1 and 1.

    Raises:
      DataError: absent, truncated or altered files.
    """
    return read(locate(SOURCE), counts=(32_561, 16_281), above=(7_841, 3_846))


def read(
    found: Location, *, counts: tuple[int, int], above: tuple[int, int]
) -> tuple[TensorDataset, TensorDataset]:
    """Reads both files in ``found``.

    Args:
      found: where they are.
      counts: rows there must be in each.
      above: how many of these are labelled 1; files that were packed again have no checksum, so this is looked at
        instead.

    Raises:
      DataError: truncated, or lines that are not what they should be; names file and line.
    """
    sets: list[TensorDataset] = []
    for name, count, positive in zip(found.names, counts, above, strict=True):
        path = found.path(name)
        rows, targets = _parsed(path)
        if (len(rows), int((targets == 1).sum())) != (count, positive):
            raise DataError(
                f"{path}: expected {count} rows, {positive} of them labelled 1, "
                f"found {len(rows)} and {int((targets == 1).sum())}"
            )
        classes = (targets + 1) // 2
        sets.append(TensorDataset(rows, targets, classes, transform=as_float, origin=f"a9a, {found.folder}"))
    return sets[0], sets[1]


def _parsed(path: Path) -> tuple[Tensor, Tensor]:
    """Rows, uint8, and labels of a file in LIBSVM's format, ``label column:1 column:1 ...`` with columns from 1 on."""
    labels: list[int] = []
    places: list[int] = []
    for number, line in enumerate(content(path).splitlines(), start=1):
        label, *entries = line.split() or [b""]
        if label not in (b"-1", b"+1", b"1"):
            raise DataError(f"{path}, line {number}: expected a label of -1 or +1, found {_shown(label)}")
        start = len(labels) * _COLUMNS - 1
        for entry in entries:
            column, _, value = entry.partition(b":")
            if value != b"1" or not column.isdigit() or len(column) > 3 or not 1 <= int(column) <= _COLUMNS:
                raise DataError(
                    f"{path}, line {number}: expected column:1 with columns 1 to {_COLUMNS}, found {_shown(entry)}"
                )
            places.append(start + int(column))
        labels.append(int(label))
    rows = torch.zeros(len(labels) * _COLUMNS, dtype=torch.uint8)
    rows[torch.tensor(places, dtype=torch.int64)] = 1
    return rows.view(len(labels), _COLUMNS), torch.tensor(labels, dtype=torch.int64)


def _shown(text: bytes) -> str:
    """A piece of a line, as far as a message has room for it."""
    return repr(text[:30].decode("utf-8", "replace"))
