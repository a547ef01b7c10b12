"""Covering arrays: few rows in which every combination of so many columns' values has still met."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, TypeVar

import pytest

Row = TypeVar("Row", bound="tuple[object, ...]")


def covering(candidates: Iterable[Row], strength: int = 2, first: Iterable[Row] = ()) -> list[Row]:
    """Few rows of a table in which any ``strength`` columns have every combination of values that they have in it.

    What fails where so many options meet fails in one of them.

    Args:
      candidates: all rows that are possible, of one length.
      strength: how many columns meet.
      first: rows to begin with.
    """
    chosen = list(dict.fromkeys(first))
    meetings = {row: set(itertools.combinations(enumerate(row), strength)) for row in (*candidates, *chosen)}
    missing = (
        set[tuple[tuple[int, object], ...]]()
        .union(*meetings.values())
        .difference(*(meetings[row] for row in chosen))
    )
    while missing:
        best = max(meetings, key=lambda row: len(meetings[row] & missing))
        chosen.append(best)
        missing -= meetings[best]
    return chosen


def covered(names: str, *values: Iterable[object], strength: int = 2, **options: Any) -> pytest.MarkDecorator:
    """Parametrizes a test by a covering array of some columns.

    Args:
      names: of the columns, with commas between.
      values: those of each column.
      strength: see :func:`covering`.
      options: more for ``parametrize``.
    """
    rows = covering(itertools.product(*values), strength)
    return pytest.mark.parametrize(names, rows, **options)


def thorough(*rows: object) -> list[Any]:
    """Returns rows for ``parametrize`` that ``scripts/test --thorough`` alone runs.

    Args:
      rows: values of one name each, or tuples of a value for each name.
    """
    return [
        pytest.param(*(row if isinstance(row, tuple) else (row,)), marks=pytest.mark.thorough) for row in rows
    ]


def diagonal(names: str, *values: Iterable[object], **options: Any) -> pytest.MarkDecorator:
    """Parametrizes a test by rows in which each value of each column is met once; the rest of the product is thorough.

    Args:
      names: of the columns, with commas between.
      values: those of each column.
      options: more for ``parametrize``.
    """
    columns = [list(each) for each in values]
    usual = [tuple(each[row % len(each)] for each in columns) for row in range(max(map(len, columns)))]
    rest = [row for row in itertools.product(*columns) if row not in usual]
    return pytest.mark.parametrize(names, [*usual, *thorough(*rest)], **options)
