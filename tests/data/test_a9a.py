"""a9a in LIBSVM's text, plain and packed."""

from __future__ import annotations

import bz2
import gzip
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from farflung.data import a9a
from farflung.data.source import Location
from farflung.errors import DataError

TRAIN = b"-1 3:1 11:1 123:1 \n+1 1:1\n-1 \n"
TEST = b"+1 2:1 4:1\r\n1 5:1"
PACKED: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress}


def put(folder: Path, train: bytes = TRAIN, test: bytes = TEST, suffix: str = "") -> Location:
    names = (f"a9a{suffix}", f"a9a.t{suffix}")
    for name, text in zip(names, (train, test), strict=True):
        (folder / name).write_bytes(PACKED[suffix](text))
    return Location(folder, names, "folder")


@pytest.mark.parametrize("suffix", PACKED)
def test_rows_and_labels(tmp_path: Path, suffix: str) -> None:
    found = put(tmp_path, suffix=suffix)
    assert found.names in (*a9a.SOURCE.layouts, tuple(file.name for file in a9a.SOURCE.files))
    train, test = a9a.read(found, counts=(3, 2), num_positive=(1, 2))
    batch = train.take(torch.arange(3), train=True)
    assert batch.inputs.shape == (3, 123)
    assert batch.inputs.dtype == torch.float32
    assert batch.inputs.nonzero().tolist() == [[0, 2], [0, 10], [0, 122], [1, 0]]
    assert batch.targets.tolist() == [-1, 1, -1]
    assert train.labels is not None
    assert train.labels.tolist() == [0, 1, 0]
    assert test.take(torch.arange(2), train=False).inputs.nonzero().tolist() == [[0, 1], [0, 3], [1, 4]]
    assert test.targets.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"-1 3:1\n0 4:1\n", "a9a: expected labels of -1 and 1 and entries of 1, found others"),
        (b"-1 3:0.5\n", "a9a: expected labels of -1 and 1 and entries of 1, found others"),
        (b"-1 3:1\n+1 124:1\n", "a9a: not a text in LIBSVM's format, or truncated .*124 features"),
        (b"-1 0:1\n", "a9a: not a text in LIBSVM's format, or truncated .*Invalid index 0"),
        (b"-1 3:1 7", "a9a: not a text in LIBSVM's format, or truncated"),
        (b"-1 \xff:1\n", "a9a: not a text in LIBSVM's format, or truncated"),
        (b"-1 99999999999:1\n", "a9a: not a text in LIBSVM's format, or truncated"),
        (b"-1 3:1\n", "a9a: expected 3 rows, 1 of them labelled 1, found 1 and 0"),
        (TRAIN.replace(b"-1", b"+1"), "expected 3 rows, 1 of them labelled 1, found 3 and 3"),
    ],
)
def test_damaged_lines(tmp_path: Path, text: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        a9a.read(put(tmp_path, text), counts=(3, 2), num_positive=(1, 2))


@pytest.mark.parametrize("suffix", [".gz", ".bz2"])
def test_damaged_files(tmp_path: Path, suffix: str) -> None:
    found = put(tmp_path, suffix=suffix)
    path = found.get_path(found.names[1])
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(DataError, match=r"a9a\.t\..*truncated"):
        a9a.read(found, counts=(3, 2), num_positive=(1, 2))
    path.write_bytes(b"something else")
    with pytest.raises(DataError, match=r"a9a\.t\..*cannot be read"):
        a9a.read(found, counts=(3, 2), num_positive=(1, 2))
    path.unlink()
    with pytest.raises(DataError, match=r"a9a\.t\..*No such file"):
        a9a.read(found, counts=(3, 2), num_positive=(1, 2))


def test_altered_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARFLUNG_DATA", str(tmp_path))
    (tmp_path / "a9a").mkdir()
    put(tmp_path / "a9a")
    with pytest.raises(DataError, match="wrong checksum: expected sha256 of lines"):
        a9a.load()
