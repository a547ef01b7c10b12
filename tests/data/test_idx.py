"""The IDX reader accepts what the format allows and names what is wrong with the rest."""

from __future__ import annotations

import gzip
import hashlib
from pathlib import Path

import pytest
import torch

from farflung.data.idx import encode_idx, read_idx, write_idx
from farflung.errors import DataError

VALUES = torch.arange(24, dtype=torch.uint8).reshape(2, 3, 4)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "values.gz"


@pytest.mark.parametrize("shape", [(0,), (1,), (5,), (2, 3, 4)])
def test_round_trip(path: Path, shape: tuple[int, ...]) -> None:
    values = torch.arange(int(torch.tensor(shape).prod()), dtype=torch.uint8).reshape(shape)
    write_idx(path, values)
    assert torch.equal(read_idx(path, shape=shape), values)
    assert read_idx(path, shape=(None, *shape[1:])).shape == shape


def test_same_bytes_each_time() -> None:
    assert encode_idx(VALUES) == encode_idx(VALUES.clone())


def test_compressed_end_missing(path: Path) -> None:
    packed = encode_idx(torch.randint(256, (100, 28, 28), generator=torch.Generator().manual_seed(0)))
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(DataError) as caught:
        read_idx(path, shape=(100, 28, 28))
    message = str(caught.value)
    assert str(path) in message
    assert "expected 78416 bytes" in message
    assert "found " in message
    assert int(message.rsplit(" ", 1)[1]) < 78416
    assert "\n" not in message


@pytest.mark.parametrize("cut", range(1, 9))
def test_trailer_missing(path: Path, cut: int) -> None:
    path.write_bytes(encode_idx(VALUES)[:-cut])
    with pytest.raises(DataError, match="truncated"):
        read_idx(path, shape=(2, 3, 4))


def test_content_shorter_than_its_header_says(path: Path) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(encode_idx(VALUES))[:-1]))
    with pytest.raises(DataError, match="expected 40 bytes after decompression, found 39"):
        read_idx(path, shape=(2, 3, 4))


def test_content_longer_than_its_header_says(path: Path) -> None:
    path.write_bytes(gzip.compress(gzip.decompress(encode_idx(VALUES)) + b"x"))
    with pytest.raises(DataError, match="found more"):
        read_idx(path, shape=(2, 3, 4))
    path.write_bytes(encode_idx(VALUES) + b"x")
    with pytest.raises(DataError, match="found more"):
        read_idx(path, shape=(2, 3, 4))


def test_header_missing(path: Path) -> None:
    path.write_bytes(gzip.compress(b"\0\0\x08"))
    with pytest.raises(DataError, match="header of 16 bytes, found 3"):
        read_idx(path, shape=(2, 3, 4))


def test_wrong_magic(path: Path) -> None:
    path.write_bytes(gzip.compress(b"\0\0\x0d\x03" + bytes(36)))
    with pytest.raises(DataError, match="expected magic 00000803, found 00000d03"):
        read_idx(path, shape=(2, 3, 4))


def test_wrong_count(path: Path) -> None:
    write_idx(path, VALUES)
    with pytest.raises(DataError, match="expected 3 x any x 4 bytes, found 2 x 3 x 4"):
        read_idx(path, shape=(3, None, 4))


def test_flipped_bit(path: Path) -> None:
    packed = bytearray(encode_idx(VALUES))
    packed[-6] ^= 1  # inside the stored CRC
    path.write_bytes(packed)
    with pytest.raises(DataError, match="damaged"):
        read_idx(path, shape=(2, 3, 4))


def test_altered_content(path: Path) -> None:
    write_idx(path, VALUES)
    right = hashlib.sha256(gzip.decompress(path.read_bytes())).hexdigest()
    assert torch.equal(read_idx(path, shape=(2, 3, 4), sha256=right), VALUES)
    write_idx(path, VALUES + 1)
    with pytest.raises(DataError, match=f"wrong checksum: expected sha256 {right}"):
        read_idx(path, shape=(2, 3, 4), sha256=right)


def test_not_gzip_and_absent(path: Path) -> None:
    path.write_bytes(b"hello")
    with pytest.raises(DataError, match="not a gzip file"):
        read_idx(path, shape=(1,))
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        read_idx(path, shape=(1,))
