"""SVHN, the cropped digits: 73,257 + 26,032 colour images of 32 x 32, from the official MATLAB files.

Reference: Netzer et al., "Reading Digits in Natural Images with Unsupervised Feature Learning", 2011.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import torch
from scipy.io import loadmat
from scipy.io.matlab import MatReadError

from farflung.data.datasets import TensorDataset
from farflung.data.images import Normalize, RandomShift
from farflung.data.source import File, Location, Source, locate, verify
from farflung.errors import DataError
from farflung.files import wrap_read_errors
from farflung.types import Workload
from farflung.workloads import Classification, resnet
from farflung.workloads.classification import build_mercury_settings, build_settings
from farflung.workloads.models import resnet18 as resnet18_network

__all__ = ["SOURCE", "load", "read", "resnet8", "resnet18"]

_HOMEPAGE = "http://ufldl.stanford.edu/housenumbers/"

SOURCE = Source(
    name="svhn",
    title="73,257 + 26,032 house-number digits, colour 32x32",
    licence="non-commercial use",
    homepage=_HOMEPAGE,
    files=(
        File(
            "train_32x32.mat",
            182040794,
            _HOMEPAGE + "train_32x32.mat",
            md5="e26dedcc434d2e4c54c9b2d4a06d8373",
        ),
        File(
            "test_32x32.mat",
            64275384,
            _HOMEPAGE + "test_32x32.mat",
            md5="eb5a983be6a315427106f1b164d9cef3",
        ),
    ),
    instructions="fetch it with: farflung data fetch benchmarks.workloads.svhn:SOURCE",
    samples=(73_257, 26_032),
)

NORMALIZE = Normalize((0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970))


def resnet8() -> Workload:
    """SVHN with the residual network of 8 layers."""
    return Classification(
        name="svhn/resnet8",
        build_network=partial(resnet, 8, 10),
        load_data=load,
        defaults=build_settings(batch_size=32, learning_rate=0.02, weight_decay=1e-4, steps=1000),
    )


def resnet18() -> Workload:
    """SVHN with ResNet-18 for images of 32 x 32, 11.2 million parameters, as Mercury's paper has it.

    For two cores there is :func:`resnet8`.
    """
    return Classification(
        name="svhn/resnet18",
        build_network=partial(resnet18_network, 10),
        load_data=load,
        defaults=build_mercury_settings(batch_size=32),
    )


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set; training images are shifted by up to 2 pixels (a mirrored digit is another sign).

    Raises:
      DataError: absent, truncated or altered files.
    """
    found = locate(SOURCE)
    for file in SOURCE.files:
        verify(found.get_path(file.name), file)
    return read(found, counts=(73_257, 26_032))


def read(found: Location, *, counts: tuple[int, int]) -> tuple[TensorDataset, TensorDataset]:
    """Reads the two files in ``found``; label 10 in them means the digit 0.

    Raises:
      DataError: truncated files, or not what they should hold.
    """
    sets: list[TensorDataset] = []
    for file, count in zip(SOURCE.files, counts, strict=True):
        path = found.get_path(file.name)
        try:
            with (
                wrap_read_errors(path, "not a MATLAB file, or truncated", DataError),
                path.open("rb") as stream,
            ):
                arrays = loadmat(stream, variable_names=["X", "y"])
        except MatReadError as error:
            raise DataError(f"{path}: {error}") from None
        shapes = {name: arrays[name].shape for name in ("X", "y") if name in arrays}
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
