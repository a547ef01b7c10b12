"""Fashion-MNIST: 60,000 + 10,000 grey images of 28 x 28, 10 kinds of clothing; a subset is in the package.

The subset holds 1,000 training and 200 test images of each class: those whose SHA-256 of ``seed/split/index`` is
smallest, in the official order (``scripts/make_fashion_subset.py``).

Reference: Xiao, Rasul, Vollgraf, "Fashion-MNIST", 2017, arXiv:1708.07747.
"""

from __future__ import annotations

import gzip
import hashlib
import math
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from farflung.data.catalog import CATALOG
from farflung.data.datasets import TensorDataset
from farflung.data.images import Normalize, RandomFlip
from farflung.data.source import Location, Variant, locate
from farflung.errors import DataError
from farflung.files import wrap_read_errors

__all__ = ["SOURCE", "load", "read", "read_idx"]

SOURCE = CATALOG["fashion-mnist"]

# SHA-256 after decompression, in the order of SOURCE.files: recompressed copies (Debian's) are the same data.
_FULL_SHA256 = (
    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
)
_SUBSET_SHA256 = (
    "625f337450d417ebc52a5395a1a0b65e7c4e2bf66a336c74fe3fa9807c0baf29",
    "db57544e5b2d0c6d467079a2a985ac6757ef5e326b332c53c3d6f9bab42acf82",
    "df50645e398559afea64bae70eafa0ebd3dab0c793c7d639036735ddf4d4384a",
    "894e5ac548a2287d49d401af59a5495f4b95242cb2ebd5119d368219f26d3546",
)

NORMALIZE = Normalize((0.2860,), (0.3530,))
AUGMENT = RandomFlip()  # shifts as well cost a point of accuracy in trainings as short as one epoch


def load(variant: Variant = "auto", *, augment: bool = True) -> tuple[TensorDataset, TensorDataset]:
    """Loads training and test set.

    Args:
      variant: Full set, packaged subset, or the full set if available.
      augment: Mirrors training images at random.

    Raises:
      DataError: Files are absent, truncated or altered.
    """
    location = locate(SOURCE, variant)
    is_packaged = location.kind == "packaged"
    counts = (10_000, 2_000) if is_packaged else (60_000, 10_000)
    return read(
        location, counts=counts, sha256=_SUBSET_SHA256 if is_packaged else _FULL_SHA256, augment=augment
    )


def read(
    location: Location,
    *,
    counts: tuple[int, int],
    sha256: tuple[str, ...] = ("", "", "", ""),
    augment: bool = True,
) -> tuple[TensorDataset, TensorDataset]:
    """Reads the four files at ``location``.

    Args:
      location: Folder of the files.
      counts: Expected training and test images.
      sha256: Checksums of the four files' content, in the order of ``SOURCE.files``; empty: unchecked.
      augment: Mirrors training images at random.

    Raises:
      DataError: Files are absent, truncated or altered.
    """
    sets = []
    for split, count in enumerate(counts):
        images, labels = SOURCE.files[2 * split], SOURCE.files[2 * split + 1]
        pixels = read_idx(location.get_path(images.name), (count, 28, 28), sha256=sha256[2 * split])
        classes = read_idx(location.get_path(labels.name), (count,), sha256=sha256[2 * split + 1]).to(
            torch.int64
        )
        if count and int(classes.max()) >= 10:
            raise DataError(
                f"{location.get_path(labels.name)}: expected labels 0 to 9, found {int(classes.max())}"
            )
        origin = f"fashion-mnist, {'packaged subset' if location.kind == 'packaged' else location.folder}"
        sets.append(
            TensorDataset(
                pixels.unsqueeze(1),
                classes,
                classes,
                transform=NORMALIZE,
                augment=AUGMENT if augment and split == 0 else None,
                origin=origin,
            )
        )
    return sets[0], sets[1]


def read_idx(path: Path, shape: tuple[int, ...], *, sha256: str = "") -> Tensor:
    """Reads a gzipped IDX file: four bytes that name type and dimensions, sizes of 32 bits, unsigned bytes.

    Args:
      path: Path of the file.
      shape: Expected shape.
      sha256: Checksum of the unpacked content, which does not depend on the packing program; empty: unchecked.

    Returns:
      A uint8 tensor.

    Raises:
      DataError: The file is no IDX file, of another shape, truncated or altered.
    """
    start = 4 + 4 * len(shape)
    size = start + math.prod(shape)
    with (
        wrap_read_errors(path, "not a gzip file, or damaged or truncated", DataError),
        gzip.open(path) as stream,
    ):
        content = stream.read(size + 1)
    magic = bytes((0, 0, 8, len(shape)))
    if content[:4] != magic or len(content) < start:
        raise DataError(f"{path}: not an IDX file of bytes in {len(shape)} dimensions")
    actual_shape = tuple(np.frombuffer(content[4:start], ">u4").tolist())
    if actual_shape != shape:
        raise DataError(f"{path}: expected {_format_shape(shape)} bytes, found {_format_shape(actual_shape)}")
    if len(content) != size:
        actual_size = "more" if len(content) > size else len(content)
        raise DataError(f"{path}: expected {size} unpacked bytes, found {actual_size}")
    digest = hashlib.sha256(content).hexdigest()
    if sha256 not in ("", digest):
        raise DataError(f"{path}: wrong checksum: expected sha256 {sha256} of its content, found {digest}")
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8, offset=start).reshape(shape))


def _format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
