"""Covertype in its official format."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
import torch

from farflung.data import covtype
from farflung.data.source import Location
from farflung.errors import DataError


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
    with pytest.raises(
        DataError, match=r"covtype\.data\.gz: not a table of whole numbers, or truncated .*column"
    ):
        covtype.read(found, count=100)
    path.write_bytes(gzip.compress(rows(100).replace(",7\n", ",8\n").encode()))
    with pytest.raises(DataError, match="expected kinds 1 to 7, found 1 to 8"):
        covtype.read(found, count=100)
    path.write_bytes(gzip.compress(rows(100).encode())[:-30])
    with pytest.raises(DataError, match="truncated"):
        covtype.read(found, count=100)
