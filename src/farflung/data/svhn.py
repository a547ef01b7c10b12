"""SVHN, the cropped digits: 73,257 + 26,032 colour images of 32 x 32, from the official MATLAB files.

Reference: Netzer et al., "Reading Digits in Natural Images with Unsupervised Feature Learning", 2011.
"""

from __future__ import annotations

import numpy as np
import torch

from farflung.data.catalog import CATALOG
from farflung.data.datasets import TensorDataset
from farflung.data.images import Normalize, RandomShift
from farflung.data.mat5 import read_mat5
from farflung.data.source import Location, locate, verify
from farflung.errors import DataError

__all__ = ["SOURCE", "load", "read"]

SOURCE = CATALOG["svhn"]


NORMALIZE = Normalize((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set; training images are shifted by up to 2 pixels (a mirrored digit is another sign).

    Raises:
      DataError: absent, truncated or altered files.
    """
    found = locate(SOURCE)
    for file in SOURCE.files:
        verify(found.path(file.name), file)
    return read(found, counts=(73_257, 26_032))


def read(found: Location, *, counts: tuple[int, int]) -> tuple[TensorDataset, TensorDataset]:
    """Reads the two files in ``found``; label 10 in them means the digit 0.

    Raises:
      DataError: truncated files, or not what they should hold.
    """
    sets: list[TensorDataset] = []
    for file, count in zip(SOURCE.files, counts, strict=True):
        path = found.path(file.name)
        arrays = read_mat5(path)
        shapes = {name: values.shape for name, values in arrays.items()}
        if shapes != {"X": (32, 32, 3, count), "y": (count, 1)}:
            raise DataError(f"{path}: expected X (32, 32, 3, {count}) and y ({count}, 1), found {shapes}")
        digits = arrays["y"][:, 0].astype(np.int64)
        if count and not (digits.min() >= 1 and digits.max() <= 10):
            raise DataError(f"{path}: expected labels 1 to 10, found {digits.min()} to {digits.max()}")
        labels = torch.from_numpy(digits % 10)
        pixels = torch.from_numpy(np.ascontiguousarray(arrays["X"].transpose(3, 2, 0, 1).astype(np.uint8)))
        sets.append(
            TensorDataset(
                pixels,
                labels,
                labels,
                transform=NORMALIZE,
                augment=None if sets else RandomShift(2),
                origin=f"svhn, {found.folder}",
            )
        )
    return sets[0], sets[1]
