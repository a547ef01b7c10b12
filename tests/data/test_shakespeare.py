"""Tiny Shakespeare in its official format."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from farflung.data import shakespeare
from farflung.data.source import Location
from farflung.errors import DataError


def test_shakespeare(tmp_path: Path) -> None:
    text = "First Citizen:\nBefore we proceed any further, hear me speak.\n" * 20
    (tmp_path / "input.txt").write_text(text)
    train, test = shakespeare.read(Location(tmp_path, ("input.txt",), "folder"), length=8)
    border = len(text) * 9 // 10
    assert len(train) == (border - 1) // 8
    batch = train.take(torch.tensor([0, 1]), train=True)

    def spell(row: torch.Tensor) -> str:
        return "".join(shakespeare.SYMBOLS[i] for i in row.tolist())

    assert [spell(row) for row in batch.inputs] == [text[:8], text[8:16]]
    assert [spell(row) for row in batch.targets] == [text[1:9], text[9:17]]
    assert spell(test.take(torch.tensor([0]), train=False).inputs[0]) == text[border : border + 8]
    assert train.labels is None


def test_windows_may_begin_at_any_character(tmp_path: Path) -> None:
    text = "".join(shakespeare.SYMBOLS[place % 65] for place in range(200))
    (tmp_path / "input.txt").write_text(text)
    train, test = shakespeare.read(Location(tmp_path, ("input.txt",), "folder"), length=8, stride=1)
    assert len(train) == 180 - 8
    assert len(test) == (20 - 1) // 8
    assert train.inputs.untyped_storage().nbytes() == 180
    for number in (0, 1, len(train) - 1):
        window = train.take(torch.tensor([number]), train=True)
        assert window.inputs[0].tolist() == [place % 65 for place in range(number, number + 8)]
        assert window.targets[0].tolist() == [place % 65 for place in range(number + 1, number + 9)]


def test_shakespeare_damaged(tmp_path: Path) -> None:
    found = Location(tmp_path, ("input.txt",), "folder")
    (tmp_path / "input.txt").write_text("abc#def" * 100)
    with pytest.raises(DataError, match="unexpected byte 35 at 3"):
        shakespeare.read(found, length=8)
    (tmp_path / "input.txt").write_text("abc")
    with pytest.raises(DataError, match="3 characters are too few for windows of 8"):
        shakespeare.read(found, length=8)
