"""MATLAB 5 files as MATLAB writes them: plain, compressed, with small elements and with narrowed numbers."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from farflung.data.mat5 import read_mat5
from farflung.data.source import Location
from farflung.data.svhn import read
from farflung.errors import DataError

TYPES = {"u1": 2, "i4": 5, "u4": 6, "f8": 9}
CLASSES = {"u1": 9, "f8": 6}


def element(kind: int, body: bytes, order: str = "<") -> bytes:
    if 0 < len(body) <= 4:
        return struct.pack(f"{order}I", len(body) << 16 | kind) + body.ljust(4, b"\0")
    return struct.pack(f"{order}II", kind, len(body)) + body + bytes(-len(body) % 8)


def matrix(
    name: str, values: npt.NDArray[np.generic], stored: str, order: str = "<", flags: int = 0
) -> bytes:
    """One array; ``stored`` is how its numbers are written, which may be narrower than what they are."""
    kind = CLASSES[values.dtype.str[1:]]
    body = element(TYPES["u4"], struct.pack(f"{order}II", kind | flags, 0), order)
    body += element(TYPES["i4"], struct.pack(f"{order}{values.ndim}i", *values.shape), order)
    body += element(1, name.encode(), order)
    body += element(TYPES[stored], values.astype(order + stored).tobytes(order="F"), order)
    return element(14, body, order)


def mat(*elements: bytes, compress: bool = True, order: str = "<") -> bytes:
    header = b"MATLAB 5.0 MAT-file".ljust(124) + (b"\x00\x01IM" if order == "<" else b"\x01\x00MI")
    for item in elements:
        if compress:
            packed = zlib.compress(item)
            header += struct.pack(f"{order}II", 15, len(packed)) + packed
        else:
            header += item
    return header


def digits(count: int) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.float64]]:
    images = np.arange(32 * 32 * 3 * count).reshape(32, 32, 3, count).astype(np.uint8)
    return images, (np.arange(count, dtype=np.float64) % 10 + 1)[:, None]


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("order", ["<", ">"])
def test_arrays(tmp_path: Path, compress: bool, order: str) -> None:
    images, labels = digits(5)
    path = tmp_path / "a.mat"
    arrays = (matrix("X", images, "u1", order), matrix("y", labels, "u1", order))
    path.write_bytes(mat(*arrays, compress=compress, order=order))
    found = read_mat5(path)
    assert list(found) == ["X", "y"]
    assert np.array_equal(found["X"], images)
    assert np.array_equal(found["y"], labels)
    assert found["y"].dtype == np.float64


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("keep", [0, 100, 130, 140, 3000, -1, -20])
def test_truncated(tmp_path: Path, compress: bool, keep: int) -> None:
    path = tmp_path / "a.mat"
    images = np.random.RandomState(0).randint(256, size=(32, 32, 3, 5)).astype(np.uint8)
    path.write_bytes(mat(matrix("X", images, "u1"), compress=compress)[:keep])
    with pytest.raises(DataError, match=r"truncated|not a MATLAB 5 file"):
        read_mat5(path)


def test_other_contents(tmp_path: Path) -> None:
    path = tmp_path / "a.mat"
    _, labels = digits(5)
    path.write_bytes(mat(matrix("y", labels, "f8", flags=0x800)))
    with pytest.raises(DataError, match="array y is not real and numeric"):
        read_mat5(path)
    path.write_bytes(mat(element(5, bytes(16))))
    with pytest.raises(DataError, match="expected an array, found an element of type 5"):
        read_mat5(path)
    wrong = matrix("y", labels, "f8").replace(struct.pack("<ii", 5, 1), struct.pack("<ii", 6, 1))
    path.write_bytes(mat(wrong))
    with pytest.raises(DataError, match="array y: expected 48 bytes, found 40"):
        read_mat5(path)


def put(folder: Path, counts: tuple[int, int]) -> Location:
    for name, count in zip(("train_32x32.mat", "test_32x32.mat"), counts, strict=True):
        images, labels = digits(count)
        (folder / name).write_bytes(mat(matrix("X", images, "u1"), matrix("y", labels, "u1")))
    return Location(folder, ("train_32x32.mat", "test_32x32.mat"), "folder")


def test_svhn(tmp_path: Path) -> None:
    train, test = read(put(tmp_path, (12, 3)), counts=(12, 3))
    assert train.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2], "10 stands for the digit 0"
    assert len(test) == 3
    images, _ = digits(12)
    assert torch.equal(train.inputs[7], torch.from_numpy(images[:, :, :, 7].transpose(2, 0, 1).copy()))


def test_svhn_counts(tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"train_32x32\.mat: expected X \(32, 32, 3, 13\) .*\(32, 32, 3, 12\)"
    ):
        read(put(tmp_path, (12, 3)), counts=(13, 3))
