"""How a split is shown: a row and a bar for each replica, as far as that can be read."""

from __future__ import annotations

from io import StringIO
from pathlib import Path

import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console

from farflung.data import Share, by_label, describe, iid
from farflung.report import partition_picture, partition_table
from farflung.report.partition import _draw


def shown(shares: list[Share], width: int = 80) -> list[str]:
    to = Console(file=StringIO(), width=width)
    to.print(partition_table(shares, "iid"))
    assert isinstance(to.file, StringIO)
    return [" ".join(line.split()) for line in to.file.getvalue().splitlines()]


def drawn(shares: list[Share]) -> Axes:
    figure = Figure()
    axes = figure.subplots()
    _draw(figure, axes, shares)
    return axes


def split(classes: int, parts: int, samples: int = 3000) -> list[Share]:
    labels = torch.arange(samples) % classes
    return describe(by_label(labels, parts, -(-classes // parts)), labels)


def test_a_column_for_each_of_few_labels() -> None:
    lines = shown([Share(5, (2, 0, 3)), Share(1000, (0, 1000, 0))])
    assert lines[0] == "iid: 1,005 training samples on 2 replicas, of each label"
    assert "replica samples 0 1 2" in lines
    assert "0 5 2 · 3" in lines
    assert "1 1,000 · 1,000 ·" in lines


def test_the_commonest_of_many_labels() -> None:
    share = Share(100, (0,) * 10 + (50, 20, 20, 10))
    assert "0 100 4 10 (50 %), 12 (20 %), 11 (20 %)" in shown([share])


def test_sizes_alone_without_labels() -> None:
    lines = shown(describe(iid(10, 3)))
    assert lines[0] == "iid: 10 training samples on 3 replicas"
    assert "0 4" in lines


def test_many_replicas_are_counted() -> None:
    lines = shown(describe(iid(1019, 100)))  # the first 19 have one sample more
    assert "18 11" in lines
    assert "81 more 10 to 10" in lines
    assert len(lines) < 30


def test_ten_labels_fit_into_a_terminal() -> None:
    lines = shown([Share(60_000, (6_000,) * 10)])
    assert "replica samples 0 1 2 3 4 5 6 7 8 9" in lines
    assert f"0 60,000{' 6,000' * 10}" in lines


@pytest.mark.parametrize(("classes", "parts"), [(3, 1), (10, 4), (20, 4), (100, 8)])
def test_bars_are_as_long_as_the_shares(classes: int, parts: int) -> None:
    shares = split(classes, parts)
    axes = drawn(shares)
    ends = [0.0] * parts
    for bars in axes.containers:
        for rank, bar in enumerate(bars.patches):  # type: ignore[attr-defined]
            assert bar.get_x() == pytest.approx(ends[rank])
            ends[rank] += bar.get_width()
    assert ends == [share.size for share in shares]
    assert (axes.get_legend() is not None) == (classes <= 20)


def test_areas_for_many_replicas() -> None:
    axes = drawn(split(10, 200))
    assert len(axes.collections) == 10
    assert not axes.containers


def test_one_colour_without_labels() -> None:
    axes = drawn(describe(iid(10, 3)))
    assert len(axes.containers) == 1
    assert axes.get_legend() is None


@pytest.mark.parametrize(
    "shares", [split(10, 4), split(100, 200), describe(iid(10, 3))], ids=["few", "many", "none"]
)
def test_the_picture_is_written_whole(shares: list[Share], tmp_path: Path) -> None:
    path = tmp_path / "new" / "partition.png"
    partition_picture(shares, path, title="fashion-mnist/cnn, $iid$")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["partition.png"]
