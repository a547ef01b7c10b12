"""Covertype and AID in their official formats."""

from __future__ import annotations

import gzip
import io
from pathlib import Path

import numpy as np
import pytest
import torch

from farflung.data import aid, covtype
from farflung.data.source import Location
from farflung.errors import DataError
from tests.data.test_archive import pack


def rows(count: int) -> str:
    table = np.arange(count * 55).reshape(count, 55) % 3000
    table[:, -1] = np.arange(count) % 7 + 1
    return "\n".join(",".join(map(str, row)) for row in table) + "\n"


@pytest.mark.parametrize("name", ["covtype.data.gz", "covtype.csv.gz"])
def test_covtype(tmp_path: Path, name: str) -> None:
    header = "" if name == "covtype.data.gz" else ",".join(f"c{i}" for i in range(55)) + "\n"
    (tmp_path / name).write_bytes(gzip.compress((header + rows(100)).encode()))
    train, test = covtype.read(Location(tmp_path, (name,), "folder"), count=100)
    assert (len(train), len(test)) == (80, 20)
    batch = train.take(torch.arange(80), train=True)
    assert batch.inputs.dtype == torch.float32
    torch.testing.assert_close(batch.inputs[:, :10].mean(dim=0), torch.zeros(10), atol=1e-5, rtol=0)
    torch.testing.assert_close(batch.inputs[:, :10].std(dim=0), torch.ones(10))
    assert torch.equal(batch.inputs[:, 10:], train.inputs[:, 10:].float())
    assert bool((train.inputs[:60, 0].diff() > 0).sum() >= 58), "the order of the file is kept"
    first = torch.cat([train.inputs[:, 0], test.inputs[:, 0]]).sort().values
    assert torch.equal(first, ((torch.arange(100) * 55) % 3000).to(torch.int16).sort().values)


def test_covtype_damaged(tmp_path: Path) -> None:
    path = tmp_path / "covtype.data.gz"
    found = Location(tmp_path, (path.name,), "folder")
    path.write_bytes(gzip.compress(rows(100).encode()))
    with pytest.raises(DataError, match="expected 101 rows of 55 columns, found 100 of 55"):
        covtype.read(found, count=101)
    path.write_bytes(gzip.compress(rows(100)[:-20].encode()))
    with pytest.raises(DataError, match=r"covtype\.data\.gz: .*column"):
        covtype.read(found, count=100)
    path.write_bytes(gzip.compress(rows(100).replace(",7\n", ",8\n").encode()))
    with pytest.raises(DataError, match="expected kinds 1 to 7, found 1 to 8"):
        covtype.read(found, count=100)
    path.write_bytes(gzip.compress(rows(100).encode())[:-30])
    with pytest.raises(DataError, match="truncated"):
        covtype.read(found, count=100)


def jpeg(level: int, size: int = 64) -> bytes:
    image = pytest.importorskip("PIL.Image")
    out = io.BytesIO()
    image.new("RGB", (size, size), (level, 0, 255 - level)).save(out, "JPEG", quality=95)
    return out.getvalue()


def photographs(count: int = 10, **changed: bytes) -> dict[str, bytes]:
    files = {f"{'Beach' if i % 2 else 'Airport'}/{i}.jpg": jpeg(20 * i) for i in range(count)}
    return {**files, **{f"Airport/{name}.jpg": content for name, content in changed.items()}}


def test_aid(tmp_path: Path) -> None:
    pack(tmp_path / "aid-64.tar", photographs(), "w")
    found = Location(tmp_path, ("aid-64.tar",), "folder")
    train, test = aid.read(found, count=10, classes=2)
    assert (len(train), len(test)) == (8, 2)
    assert train.inputs.shape == (8, 3, 64, 64)
    assert torch.bincount(torch.cat([train.targets, test.targets])).tolist() == [5, 5]
    assert bool((train.targets.diff() >= 0).all()), "by name, whatever the order in the archive"
    again, _ = aid.read(found, count=10, classes=2)
    assert torch.equal(train.inputs, again.inputs)
    reds = sorted(torch.cat([train.inputs, test.inputs])[:, 0].float().mean(dim=(1, 2)).tolist())
    assert all(abs(red - 20 * i) < 3 for i, red in enumerate(reds))
    assert train.augment is not None
    assert test.augment is None


def test_aid_damaged(tmp_path: Path) -> None:
    path = tmp_path / "aid-64.tar"
    found = Location(tmp_path, (path.name,), "folder")
    pack(path, photographs(), "w")
    with pytest.raises(DataError, match="expected 11 images in 2 classes, found 10 in 2"):
        aid.read(found, count=11, classes=2)
    pack(path, photographs(cut=jpeg(10)[:200]), "w")
    with pytest.raises(DataError, match=r"Airport/cut\.jpg: not a whole JPEG image"):
        aid.read(found, count=11, classes=2)
    pack(path, photographs(large=jpeg(10, 80)), "w")
    with pytest.raises(DataError, match=r"Airport/large\.jpg: expected 64 x 64 pixels, found 80 x 80"):
        aid.read(found, count=11, classes=2)
