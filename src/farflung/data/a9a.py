"""Data set a9a: 32,561 + 16,281 people of the census of 1994, 123 binary columns, income over $50,000 or not.

The Adult data set as LIBSVM publishes it: measured columns are cut at their quintiles, so every entry is 0 or 1. Read
from the official text files ``a9a`` and ``a9a.t``, or from these packed by gzip or bzip2. Needs scikit-learn (the
extra ``sklearn``).

References: Kohavi, "Scaling up the accuracy of naive-Bayes classifiers", 1996; Platt, "Fast training of support
vector machines using sequential minimal optimization", 1998, for the columns.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from farflung.data.catalog import CATALOG
from farflung.data.datasets import TensorDataset
from farflung.data.source import Location, locate, verify
from farflung.errors import DataError
from farflung.extras import require_modules
from farflung.files import wrap_read_errors

__all__ = ["SOURCE", "load", "read"]

SOURCE = CATALOG["a9a"]

_COLUMNS = 123


def load() -> tuple[TensorDataset, TensorDataset]:
    """Loads training and test set; targets are -1 and 1.

    Raises:
      DataError: Files are absent, truncated or altered.
      MissingExtra: scikit-learn is not installed.
    """
    location = locate(SOURCE)
    if location.names == tuple(file.name for file in SOURCE.files):  # others are packed anew by users
        for file in SOURCE.files:
            verify(location.get_path(file.name), file)
    return read(location, counts=(32_561, 16_281), num_positive=(7_841, 3_846))


def read(
    location: Location, *, counts: tuple[int, int], num_positive: tuple[int, int]
) -> tuple[TensorDataset, TensorDataset]:
    """Reads both files at ``location``.

    Args:
      location: Folder and names of the files.
      counts: Expected rows of each file.
      num_positive: Expected rows labelled 1, checked because repacked files have no checksum.

    Raises:
      DataError: A file is truncated, or has unexpected lines.
      MissingExtra: scikit-learn is not installed.
    """
    require_modules("data set a9a", "sklearn", extra="sklearn")
    from sklearn.datasets import load_svmlight_file

    sets: list[TensorDataset] = []
    for name, count, positive in zip(location.names, counts, num_positive, strict=True):
        path = location.get_path(name)
        with wrap_read_errors(path, "not a text in LIBSVM's format, or truncated", DataError):
            matrix, labels = load_svmlight_file(str(path), n_features=_COLUMNS, zero_based=False)
        if not (matrix.data == 1).all() or not np.isin(labels, (-1, 1)).all():
            raise DataError(f"{path}: expected labels of -1 and 1 and entries of 1, found others")
        rows = torch.from_numpy(matrix.toarray().astype(np.uint8))
        targets = torch.from_numpy(labels.astype(np.int64))
        if (len(rows), int((targets == 1).sum())) != (count, positive):
            raise DataError(
                f"{path}: expected {count} rows, {positive} of them labelled 1, "
                f"found {len(rows)} and {int((targets == 1).sum())}"
            )
        classes = (targets + 1) // 2
        sets.append(
            TensorDataset(rows, targets, classes, transform=Tensor.float, origin=f"a9a, {location.folder}")
        )
    return sets[0], sets[1]
