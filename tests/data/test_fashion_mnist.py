"""The packaged subset is what it says; damaged copies are refused."""

from __future__ import annotations

import importlib.util
import shutil
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


def test_truncated_file(folder: Path) -> None:
    path = folder / "t10k-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-100_000])
    found = locate(fashion_mnist.SOURCE)
    with pytest.raises(DataError, match=r"t10k-images.*truncated: expected 1568016 bytes .*, found \d+"):
        fashion_mnist.read(found, counts=(10_000, 2_000))


def test_another_number_of_images(folder: Path) -> None:
    with pytest.raises(
        DataError, match=r"train-images.*expected 60000 x 28 x 28 bytes, found 10000 x 28 x 28"
    ):
        fashion_mnist.load("full")


def test_altered_images(folder: Path) -> None:
    found = locate(fashion_mnist.SOURCE)
    with pytest.raises(DataError, match="wrong checksum"):
        fashion_mnist.read(found, counts=(10_000, 2_000), sha256=("0" * 64, "", "", ""))


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
