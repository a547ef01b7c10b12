"""CIFAR is read from the official binary archives and from their unpacked folders."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from farflung.data import catalog
from farflung.data.cifar import CIFAR10, CIFAR100, Layout, load, read
from farflung.data.source import Location, find
from farflung.errors import DataError
from tests.data.test_source import pack


def shrink(layout: Layout) -> Layout:
    """The layout with four records in each file."""
    return dataclasses.replace(layout, num_records=(4, 4))


def files(layout: Layout) -> dict[str, bytes]:
    """Files in the official format: record ``i`` of file ``f`` has class ``4 f + i`` and pixels that count up."""
    contents = {}
    for number, name in enumerate(layout.checksums):
        records = b""
        for i in range(4):
            label = (4 * number + i) % layout.num_classes
            coarse = b"\x07" if layout.label_bytes == 2 else b""
            records += coarse + bytes([label]) + bytes((label + pixel) % 256 for pixel in range(3072))
        contents[name] = records
    return contents


@pytest.fixture(params=["archive", "folder"])
def packing(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def put(folder: Path, layout: Layout, packing: str, contents: dict[str, bytes]) -> Location:
    if packing == "archive":
        name = layout.source.files[0].name
        pack(folder / name, contents)
        return Location(folder, (name,), "folder")
    for name, content in contents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return Location(folder, tuple(contents), "folder")


@pytest.mark.parametrize("layout", [CIFAR10, CIFAR100], ids=["10", "100"])
def test_official_format(tmp_path: Path, layout: Layout, packing: str) -> None:
    small = shrink(layout)
    train, test = read(put(tmp_path, small, packing, files(small)), small)
    count = 4 * (len(small.md5) - 1)
    assert train.inputs.shape == (count, 3, 32, 32)
    assert train.targets.tolist() == [i % layout.num_classes for i in range(count)]
    assert test.targets.tolist() == [(count + i) % layout.num_classes for i in range(4)]
    assert train.labels is not None
    assert torch.equal(train.labels, train.targets)
    wanted = (3 + torch.arange(3072)).remainder(256).to(torch.uint8).reshape(3, 32, 32)
    assert torch.equal(train.inputs[3], wanted), "red, green and blue planes, row by row"


def test_training_images_are_shifted_as_far_as_is_asked_for(tmp_path: Path) -> None:
    small = shrink(CIFAR10)
    white = (b"\0" + b"\xff" * 3072) * 4
    found = put(tmp_path, small, "folder", dict.fromkeys(files(small), white))
    for shift in (2, 4):
        train, test = read(found, small, shift=shift)
        assert test.augment is None
        assert train.augment is not None
        torch.manual_seed(0)
        empty = (train.augment(train.inputs.repeat(20, 1, 1, 1)) == 0).all(dim=3).sum(dim=2)
        assert int(empty.max()) == shift, "rows that came in"


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("data_batch_2", lambda content: content[:-9], r"expected 4 records .*\(12292\), found 12283 bytes"),
        ("test_batch", lambda content: b"\x0a" + content[1:], "expected classes 0 to 9, found 10"),
    ],
)
def test_damaged(tmp_path: Path, packing: str, name: str, change: Any, says: str) -> None:
    small = shrink(CIFAR10)
    contents = files(small)
    name = f"cifar-10-batches-bin/{name}.bin"
    contents[name] = change(contents[name])
    with pytest.raises(DataError, match=says):
        read(put(tmp_path, small, packing, contents), small)


def test_altered_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARFLUNG_DATA", str(tmp_path))
    (tmp_path / "cifar-10").mkdir()
    put(tmp_path / "cifar-10", CIFAR10, "folder", files(CIFAR10))
    with pytest.raises(DataError, match="wrong checksum"):
        load(CIFAR10)


def test_an_altered_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FARFLUNG_DATA", str(tmp_path))
    (tmp_path / "cifar-10").mkdir()
    put(tmp_path / "cifar-10", CIFAR10, "archive", files(CIFAR10))
    with pytest.raises(DataError, match="expected 170052171 bytes"):
        load(CIFAR10)


def test_the_real_set() -> None:
    try:
        found = find(catalog.lookup_source("cifar-10"))
    except DataError as error:
        pytest.skip(str(error))
    if found is None:
        pytest.skip("cifar-10 is not at hand: farflung data fetch cifar-10")
    train, test = load(CIFAR10)
    assert torch.bincount(train.targets).tolist() == [5000] * 10
    assert torch.bincount(test.targets).tolist() == [1000] * 10
    everything = train.take(torch.arange(0, 50_000, 10), train=False).inputs
    assert float(everything.mean().abs()) < 0.02
    assert float((everything.std() - 1).abs()) < 0.02
