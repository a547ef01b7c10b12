"""All interleavings of few faults among three members; ``python -m tests.membership.exhaustive`` tries more of them."""

from __future__ import annotations

import pytest

from tests.membership.exhaustive import ALL, FEW, LIMIT, Exhausted, Fault, explore


def name_of(faults: tuple[Fault, ...]) -> str:
    return " and ".join("-".join(fault) for fault in faults)


@pytest.mark.parametrize("faults", FEW, ids=name_of)
def test_no_interleaving_breaks_a_law(faults: tuple[Fault, ...]) -> None:
    assert explore(faults) > 20


@pytest.mark.slow
@pytest.mark.parametrize("faults", [x for x in ALL if x not in FEW], ids=name_of)
def test_no_interleaving_of_two_faults_breaks_a_law(faults: tuple[Fault, ...]) -> None:
    try:
        explore(faults, limit=LIMIT)
    except Exhausted:
        pytest.skip(f"more than {LIMIT:,} states: those that were entered broke no law")
