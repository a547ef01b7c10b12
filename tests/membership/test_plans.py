"""Seeded plans of faults in virtual time; ``python -m tests.membership.plans --count 20000`` runs more of them."""

from __future__ import annotations

import pytest

from tests.covering import thorough
from tests.membership.plans import check

PLANS, FEW, TOGETHER = 1500, 300, 50


@pytest.mark.parametrize("first", [*range(0, FEW, TOGETHER), *thorough(*range(FEW, PLANS, TOGETHER))])
def test_no_plan_breaks_a_law(first: int) -> None:
    broken = [law for seed in range(first, first + TOGETHER) if (law := check(seed))]
    assert not broken


@pytest.mark.slow
@pytest.mark.parametrize("first", range(PLANS, 20_000, 500))
def test_no_plan_of_many_breaks_a_law(first: int) -> None:
    broken = [law for seed in range(first, first + 500) if (law := check(seed))]
    assert not broken
