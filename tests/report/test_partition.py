"""How a split is shown: a row for each replica, as far as that can be read."""

from __future__ import annotations

from io import StringIO

from rich.console import Console

from farflung.data import Share
from farflung.report import render_partition_table


def shown(shares: list[Share], width: int = 80) -> list[str]:
    to = Console(file=StringIO(), width=width)
    to.print(render_partition_table(shares, "iid"))
    assert isinstance(to.file, StringIO)
    return [" ".join(line.split()) for line in to.file.getvalue().splitlines()]


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
    lines = shown([Share(4, ()), Share(3, ()), Share(3, ())])
    assert lines[0] == "iid: 10 training samples on 3 replicas"
    assert "0 4" in lines


def test_many_replicas_are_counted() -> None:
    lines = shown([Share(11, ())] * 19 + [Share(10, ())] * 81)
    assert "18 11" in lines
    assert "81 more 10 to 10" in lines
    assert len(lines) < 30


def test_ten_labels_fit_into_a_terminal() -> None:
    lines = shown([Share(60_000, (6_000,) * 10)])
    assert "replica samples 0 1 2 3 4 5 6 7 8 9" in lines
    assert f"0 60,000{' 6,000' * 10}" in lines
