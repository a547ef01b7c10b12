"""CIFAR-10 and CIFAR-100: 50,000 + 10,000 colour images of 32 x 32, from the official binary archives.

A record is one byte for the class (CIFAR-100: coarse, then fine) and 3,072 bytes of red, green and blue rows. Read
from the archive itself or from its unpacked folder. The other official archives hold pickles and are not read.

Reference: Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from farflung.data.catalog import CATALOG
from farflung.data.datasets import TensorDataset
from farflung.data.images import Compose, Normalize, RandomFlip, RandomShift
from farflung.data.source import File, Location, Source, locate, read_members, verify
from farflung.errors import DataError

__all__ = ["CIFAR10", "CIFAR100", "Layout", "load", "read"]

_PIXELS = 3 * 32 * 32


@dataclass(frozen=True, slots=True)
class Layout:
    """File layout of one of the two sets.

    Args:
      source: Name, archive and folder.
      md5: Published checksums of the unpacked files, in the order of the folder's layout, the test file last.
      num_records: Records of each training file, and of the test file.
      label_bytes: Bytes before the pixels; the last one is the class.
      num_classes: Number of classes.
      normalize: Mean and spread of the training pixels.
    """

    source: Source
    md5: tuple[str, ...]
    num_records: tuple[int, int]
    label_bytes: int
    num_classes: int
    normalize: Normalize

    @property
    def checksums(self) -> dict[str, str]:
        """Checksum of each unpacked file by name."""
        return dict(zip(self.source.layouts[0], self.md5, strict=True))


CIFAR10 = Layout(
    source=CATALOG["cifar-10"],
    md5=(
        "5dd7e06a14cb22eb9f671a540d1b7c25",
        "5ea93a67294ea407fff1d09f752e9692",
        "942cd6a4bcdd0dd3c604fbe906cb4421",
        "ae636b3ba5c66a11e91e8cb52e771fcb",
        "53f37980c15c3d472c316c40844f3f0d",
        "803d5f7f4d78ea53de84dbe85f74fb6d",
    ),
    num_records=(10_000, 10_000),
    label_bytes=1,
    num_classes=10,
    normalize=Normalize((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
)
"""Layout of CIFAR-10."""

CIFAR100 = Layout(
    source=CATALOG["cifar-100"],
    md5=(
        "6172c7755cfe09b2fe270c85cebc1b15",
        "4499cfba6c016c1be1438163640a0898",
    ),
    num_records=(50_000, 10_000),
    label_bytes=2,
    num_classes=100,
    normalize=Normalize((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
)
"""Layout of CIFAR-100 with its 100 fine classes."""


def load(layout: Layout, *, shift: int = 2) -> tuple[TensorDataset, TensorDataset]:
    """Loads training and test set from fetched files; training images are shifted and mirrored at random.

    Args:
      layout: Layout of the set.
      shift: Largest shift in pixels; the usual 4 slow the first epoch down.

    Raises:
      DataError: Files are absent, truncated or altered.
    """
    location = locate(layout.source)
    if location.names != tuple(file.name for file in layout.source.files):
        for name, md5 in layout.checksums.items():
            verify(location.get_path(name), File(name, md5=md5))
    else:
        verify(location.get_path(location.names[0]), layout.source.files[0])
    return read(location, layout, shift=shift)


def read(location: Location, layout: Layout, *, shift: int = 2) -> tuple[TensorDataset, TensorDataset]:
    """Reads the archive at ``location`` or the files it unpacks to; ``shift`` as for :func:`load`.

    Raises:
      DataError: Files are absent or truncated, or classes do not exist.
    """
    archive = layout.source.files[0].name
    if location.names == (archive,):
        path = location.get_path(archive)
        contents = read_members(path, list(layout.checksums))
    else:
        path = location.folder
        contents = [location.get_path(name).read_bytes() for name in layout.checksums]
    size = layout.label_bytes + _PIXELS
    train, test = layout.num_records
    counts = [*[train] * (len(contents) - 1), test]
    for name, count, content in zip(layout.checksums, counts, contents, strict=True):
        if len(content) != count * size:
            raise DataError(
                f"{path}: {name}: expected {count} records of {size} bytes ({count * size}), "
                f"found {len(content)} bytes"
            )
    augment = Compose(RandomShift(shift), RandomFlip())
    return _build_dataset(path, layout, contents[:-1], augment), _build_dataset(
        path, layout, contents[-1:], None
    )


def _build_dataset(
    path: Path, layout: Layout, contents: list[bytes], augment: Compose | None
) -> TensorDataset:
    size = layout.label_bytes + _PIXELS
    records = np.frombuffer(bytearray().join(contents), dtype=np.uint8).reshape(-1, size)
    labels = torch.from_numpy(records[:, layout.label_bytes - 1].astype(np.int64))
    if len(labels) and int(labels.max()) >= layout.num_classes:
        raise DataError(f"{path}: expected classes 0 to {layout.num_classes - 1}, found {int(labels.max())}")
    pixels = torch.from_numpy(np.ascontiguousarray(records[:, layout.label_bytes :])).reshape(-1, 3, 32, 32)
    return TensorDataset(
        pixels,
        labels,
        labels,
        transform=layout.normalize,
        augment=augment,
        origin=f"{layout.source.name}, {path}",
    )
