"""The Aerial Image Dataset at 64 x 64: 10,000 colour images in 30 classes, of which a fixed fifth is for testing.

There is no official split; here the 2,000 images whose SHA-256 of seed and name is smallest are the test set.
Needs Pillow (the extra ``data``) to decode JPEG; two versions of its decoder may differ by one level in a pixel.

Reference: Xia et al., "AID: A Benchmark Dataset for Performance Evaluation of Aerial Scene Classification", 2017.
"""

from __future__ import annotations

import hashlib
import io
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from farflung.data.archive import members
from farflung.data.catalog import CATALOG
from farflung.data.datasets import TensorDataset
from farflung.data.images import Chain, Normalize, RandomFlip, RandomShift
from farflung.data.source import Location, locate
from farflung.errors import DataError
from farflung.extras import need

__all__ = ["SOURCE", "load", "read"]

SOURCE = CATALOG["aid-64"]


NORMALIZE = Normalize((0.398, 0.409, 0.368), (0.214, 0.190, 0.184))
_SPLIT_SEED = 0


def load() -> tuple[TensorDataset, TensorDataset]:
    """Training and test set; training images are shifted by up to 6 pixels and mirrored at random.

    Raises:
      DataError: absent, truncated or altered file.
      MissingExtra: Pillow is not installed.
    """
    return read(locate(SOURCE), count=10_000, classes=30)


def read(found: Location, *, count: int, classes: int) -> tuple[TensorDataset, TensorDataset]:
    """Reads the archive in ``found``; ``count`` images in ``classes`` classes there must be.

    Raises:
      DataError: truncated, another number of images or classes, or an image that is not 64 x 64.
      MissingExtra: Pillow is not installed.
    """
    need("data set aid-64", "PIL", extra="data")
    path = found.path(SOURCE.files[0].name)
    images = dict(sorted(members(path, lambda name: name.lower().endswith(".jpg"))))
    names = sorted({name.split("/")[0] for name in images})
    if (len(images), len(names)) != (count, classes):
        raise DataError(
            f"{path}: expected {count} images in {classes} classes, found {len(images)} in {len(names)}"
        )
    pixels = torch.from_numpy(np.stack([_decode(path, *item) for item in images.items()]))
    labels = torch.tensor([names.index(name.split("/")[0]) for name in images])
    keys = [hashlib.sha256(f"{_SPLIT_SEED}/{name}".encode()).digest() for name in images]
    ranked = sorted(range(count), key=keys.__getitem__)
    test, train = (torch.tensor(sorted(ids)) for ids in (ranked[: count // 5], ranked[count // 5 :]))
    origin = f"aid-64, {found.folder}"
    augment = Chain(RandomShift(6), RandomFlip())
    return (
        TensorDataset(pixels[train], labels[train], labels[train], NORMALIZE, augment, origin=origin),
        TensorDataset(pixels[test], labels[test], labels[test], NORMALIZE, origin=origin),
    )


def _decode(path: Path, name: str, content: bytes) -> npt.NDArray[np.uint8]:
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=["JPEG"]) as image:
            size, values = image.size, np.asarray(image.convert("RGB"), dtype=np.uint8)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: {name}: not a whole JPEG image ({error})") from None
    if size != (64, 64):
        raise DataError(f"{path}: {name}: expected 64 x 64 pixels, found {size[0]} x {size[1]}")
    return values.transpose(2, 0, 1)
