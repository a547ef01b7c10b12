"""A covering array leaves out rows, and no combination of so many columns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import pytest

from tests.covering import covering

ROWS = [row for row in itertools.product("abcd", [1, 2, 3], "xyz", [True, False]) if row[:2] != ("a", 1)]


def meetings(rows: Iterable[tuple[object, ...]], strength: int) -> set[tuple[tuple[int, object], ...]]:
    return {meeting for row in rows for meeting in itertools.combinations(enumerate(row), strength)}


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 18), (3, 48)])
def test_whatever_can_meet_meets(strength: int, most: int) -> None:
    chosen = covering(ROWS, strength)
    assert set(chosen) <= set(ROWS)
    assert meetings(chosen, strength) == meetings(ROWS, strength)
    assert len(chosen) <= most


def test_some_rows_are_there_first() -> None:
    first = [ROWS[7], ROWS[3]]
    assert covering(ROWS, first=first)[:2] == first
