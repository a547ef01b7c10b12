"""The packaged subset is what it says; damaged copies are refused."""

from __future__ import annotations

import gzip
import hashlib
import importlib.util
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from farflung.data import fashion_mnist, locate
from farflung.data.source import PACKAGED
from farflung.errors import DataError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder that holds the packaged files under the official names."""
    shutil.copytree(PACKAGED / "fashion-mnist", tmp_path / "fashion-mnist")
    monkeypatch.setenv("FARFLUNG_DATA", str(tmp_path))
    return tmp_path / "fashion-mnist"


def test_packaged_subset() -> None:
    train, test = fashion_mnist.load("packaged")
    assert train.labels is not None
    assert test.labels is not None
    assert torch.bincount(train.labels).tolist() == [1000] * 10
    assert torch.bincount(test.labels).tolist() == [200] * 10
    assert train.inputs.shape == (10_000, 1, 28, 28)
    assert train.inputs.dtype == torch.uint8
    assert "packaged" in train.origin
    everything = test.take(torch.arange(len(test)), train=False)
    assert everything.inputs.dtype == torch.float32
    assert abs(float(everything.inputs.mean())) < 0.05
    assert abs(float(everything.inputs.std()) - 1) < 0.05


def test_packaged_size_and_licence() -> None:
    files = list((PACKAGED / "fashion-mnist").iterdir())
    assert sum(path.stat().st_size for path in files) < 8_000_000
    assert "Zalando" in (PACKAGED / "fashion-mnist" / "LICENSE").read_text()


def test_only_training_is_augmented_and_only_from_the_current_state() -> None:
    train, test = fashion_mnist.load("packaged")
    ids = torch.arange(16)
    torch.manual_seed(5)
    one = train.take(ids, train=True).inputs
    torch.manual_seed(5)
    assert torch.equal(train.take(ids, train=True).inputs, one)
    assert not torch.equal(train.take(ids, train=True).inputs, one)
    before = torch.get_rng_state()
    plain = train.take(ids, train=False).inputs
    assert torch.equal(test.take(ids, train=True).inputs, test.take(ids, train=False).inputs)
    assert torch.equal(torch.get_rng_state(), before)
    assert not torch.equal(plain, one)


def test_other_images(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"train-images.*expected 60000 x 28 x 28 bytes, found 10000 x 28 x 28"
    ):
        fashion_mnist.load("full")
    found = locate(fashion_mnist.SOURCE)
    with pytest.raises(DataError, match="wrong checksum"):
        fashion_mnist.read(found, counts=(10_000, 2_000), sha256=("0" * 64, "", "", ""))
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100_000])
    with pytest.raises(DataError, match=r"t10k-images.*truncated"):
        fashion_mnist.read(found, counts=(10_000, 2_000))


@pytest.mark.thorough
def test_the_subset_is_what_its_script_chooses() -> None:
    try:
        full = fashion_mnist.load("full")
    except DataError as error:
        pytest.skip(str(error))
    script = Path(__file__).parents[2] / "scripts" / "make_fashion_subset.py"
    spec = importlib.util.spec_from_file_location("make_fashion_subset", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for split, whole, part in zip(("train", "t10k"), full, fashion_mnist.load("packaged"), strict=True):
        ids = module.chosen(whole.targets, split)
        assert torch.equal(whole.inputs[ids], part.inputs)
        assert torch.equal(whole.targets[ids], part.targets)


# --- the format -----------------------------------------------------------------------------------------------------

CONTENT = bytes((0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 3, 0, 0, 0, 4, *range(24)))
packed = partial(gzip.compress, mtime=0)  # the same bytes, and so names of tests, in all processes
PACKED = packed(CONTENT)
SHAPE = (2, 3, 4)


def test_idx(tmp_path: Path) -> None:
    path = tmp_path / "values.gz"
    path.write_bytes(PACKED)
    for sha256 in ("", hashlib.sha256(CONTENT).hexdigest()):
        values = fashion_mnist.read_idx(path, SHAPE, sha256=sha256)
        assert torch.equal(values, torch.arange(24, dtype=torch.uint8).reshape(SHAPE))
    path.write_bytes(packed(bytes((0, 0, 8, 1, 0, 0, 0, 0))))
    assert fashion_mnist.read_idx(path, (0,)).shape == (0,)


@pytest.mark.parametrize(
    ("stored", "message"),
    [
        (PACKED[: len(PACKED) // 2], "not a gzip file, or damaged or truncated"),
        *((PACKED[:-cut], "not a gzip file, or damaged or truncated") for cut in range(1, 9)),
        (packed(CONTENT[:-1]), "expected 40 unpacked bytes, found 39"),
        (packed(CONTENT + b"x"), "expected 40 unpacked bytes, found more"),
        (PACKED + b"x", "cannot be read"),
        (packed(CONTENT[:3]), "not an IDX file of bytes in 3 dimensions"),
        (packed(b"\0\0\x0d" + CONTENT[3:]), "not an IDX file of bytes in 3 dimensions"),
        (packed(CONTENT[:7] + b"\3" + CONTENT[8:]), "expected 2 x 3 x 4 bytes, found 3 x 3 x 4"),
        (PACKED[:-6] + bytes((PACKED[-6] ^ 1,)) + PACKED[-5:], "cannot be read .*CRC"),
        (packed(CONTENT[:-1] + b"x"), "wrong checksum: expected sha256"),
        (b"hello", "cannot be read .*Not a gzipped file"),
        (None, "cannot be read .*No such file"),
    ],
)
def test_damaged_idx(tmp_path: Path, stored: bytes | None, message: str) -> None:
    path = tmp_path / "values.gz"
    if stored is not None:
        path.write_bytes(stored)
    with pytest.raises(DataError, match=f"^{path}: {message}"):
        fashion_mnist.read_idx(path, SHAPE, sha256=hashlib.sha256(CONTENT).hexdigest())
