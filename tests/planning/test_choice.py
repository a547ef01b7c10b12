"""The choice rules recipes out by gaps that exceed their noise, and chooses the earliest of the others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest

from farflung.planning.choice import (
    SHRINKS,
    UNFOUND_FACTOR,
    Pilot,
    PlanRow,
    Search,
    bound_crossing,
    compare_pilots,
    find_crossing,
)
from farflung.planning.timing import Pace

STEPS, SAMPLES = 1200, 400
SECONDS = 0.1
"""Processor seconds of a pilot's step."""


def build_pilot(steps: int, score: float, *, noisy: int = 0) -> Pilot:
    """A pilot whose score rises evenly; of ``noisy`` samples, half are right where the reference is wrong."""
    scores = [0.0] * noisy + [1.0] * round(score * SAMPLES)
    curve = [(steps * tenth // 10, score * tenth / 10) for tenth in range(1, 11)]
    return Pilot(steps, curve, [*scores, *[0.0] * SAMPLES][:SAMPLES], seconds=SECONDS * steps)


class Race:
    """Candidates with a time of a step and a score at the end of any pilot."""

    def __init__(
        self, step_s: Mapping[str, float], scores: Mapping[str, float], noisy: Mapping[str, int] = {}
    ) -> None:
        self.step_s, self.scores, self.noisy = step_s, scores, noisy
        self.trained: list[tuple[str, int]] = []

    def train(self, name: str, steps: int) -> list[Pilot]:
        self.trained.append((name, steps))
        return [build_pilot(steps, self.scores[name], noisy=self.noisy.get(name, 0))]

    def search(self, **options: Any) -> Search:
        rows = {
            name: PlanRow(name, pace=Pace(0, 0.0, 0.0, [step_s], [step_s], 0.0, 10.0), status="timed")
            for name, step_s in self.step_s.items()
        }
        settings: dict[str, Any] = {"tolerance": 0.05, "budget_steps": STEPS, **options}
        return Search(rows, "reference", ["dense"], STEPS, 0.25, self.train, **settings)

    def list_outcomes(self, **options: Any) -> dict[str, tuple[str, str]]:
        search = self.search(**options)
        search.choose()
        return {name: (row.status, row.reason) for name, row in search.rows.items()}


def test_fastest_recipe_within_the_tolerance_wins_and_slower_ones_need_no_pilot() -> None:
    race = Race(
        {"reference": 10.0, "dense": 20.0, "fast": 1.0, "good": 2.0, "slow": 8.0},
        {"reference": 0.8, "fast": 0.5, "good": 0.8, "slow": 0.9},
    )
    search = race.search()
    assert search.choose() == "good"
    assert {name: row.status for name, row in search.rows.items()} == {
        "reference": "reaches",
        "dense": "reaches",
        "fast": "misses",
        "good": "reaches",
        "slow": "slower",
    }
    assert race.trained == [
        ("fast", 100), ("reference", 100), ("good", 100), ("good", 300), ("reference", 300)
    ]  # fmt: skip
    good = search.rows["good"]
    crossing = (0.95 * 0.8 - 0.05) / 0.8  # of the mean of the last two evaluations, less the tolerance
    assert good.steps == pytest.approx(crossing * STEPS * SHRINKS, abs=1)  # twice as long twice, half of it
    assert good.sent_nbytes == 10 * (good.steps or 0)


def test_gap_within_its_noise_is_no_veto_but_a_longer_pilot() -> None:
    race = Race(
        {"reference": 10.0, "dense": 20.0, "near": 1.0}, {"reference": 0.8, "near": 0.74}, {"near": 100}
    )
    assert race.list_outcomes(budget_steps=math.inf)["near"] == ("misses", "")
    assert ("near", 600) in race.trained
    race.scores = {**race.scores, "near": 0.76}
    assert race.list_outcomes(budget_steps=math.inf)["near"] == ("reaches", "")


def test_last_pilot_is_begun_after_all_candidates_have_been_tried() -> None:
    race = Race(
        {"reference": 10.0, "dense": 20.0, "near": 1.0, "good": 2.0, "slow": 9.0},
        {"reference": 0.8, "near": 0.74, "good": 0.8},
        {"near": 100},
    )
    search = race.search(budget_steps=2 * (100 + 300) + (100 + 300))
    assert search.choose() == "good"
    assert search.rows["near"].status == "misses"
    assert race.trained[-2:] == [("good", 100), ("good", 300)]
    race.trained.clear()
    assert race.search(budget_steps=math.inf).choose() == "good"
    assert race.trained[-2:] == [("near", 600), ("reference", 600)]


def test_short_pilots_allow_twice_the_tolerance() -> None:
    race = Race({"reference": 10.0, "dense": 20.0, "late": 1.0}, {"reference": 0.8, "late": 0.71})
    assert race.list_outcomes()["late"] == ("misses", "")
    assert ("late", 300) in race.trained


SPENT = ("untried", "the budget is spent")


@pytest.mark.parametrize(
    ("budget", "good"),
    [
        (
            {"budget_steps": 149},
            SPENT,
        ),  # 100 steps of fast and of the reference, and then 100 of good, of twice as many
        ({"budget_steps": 449}, SPENT),  # and then 300 of good and of the reference
        ({"budget_steps": 450}, ("reaches", "")),
        ({"budget_s": 899 * SECONDS}, SPENT),
        ({"budget_s": 901 * SECONDS}, ("reaches", "")),
    ],
)
def test_pilot_that_would_exceed_the_budget_is_not_begun(
    budget: dict[str, float], good: tuple[str, str]
) -> None:
    race = Race(
        {"reference": 10.0, "dense": 20.0, "fast": 1.0, "good": 2.0},
        {"reference": 0.8, "fast": 0.5, "good": 0.8},
    )
    outcomes = race.list_outcomes(**budget)
    assert outcomes["good"] == good
    assert outcomes["reference"] == ("reaches", "")
    steps = sum(steps for _, steps in race.trained)
    assert steps <= UNFOUND_FACTOR * budget.get("budget_steps", math.inf)
    assert SECONDS * steps <= budget.get("budget_s", math.inf)


def test_default_budget_is_larger_while_nothing_but_the_reference_reaches_the_target() -> None:
    race = Race(
        {"reference": 10.0, "dense": 20.0, "first": 1.0, "second": 1.01},
        {"reference": 0.8, "first": 0.8, "second": 0.8},
    )
    outcomes = race.list_outcomes(budget_steps=2 * (100 + 300))
    assert outcomes["first"] == ("reaches", "")
    assert outcomes["second"] == SPENT
    race.scores = {**race.scores, "first": 0.5}
    assert race.list_outcomes(budget_steps=2 * (100 + 300))["second"] == ("reaches", "")


def test_recipe_with_long_blocks_is_not_tried() -> None:
    race = Race({"reference": 10.0, "dense": 20.0, "blocks": 0.5}, {"reference": 0.8, "blocks": 0.8})
    reason = "its blocks are too long for pilots of 300 steps"
    assert race.list_outcomes(min_steps={"blocks": 301})["blocks"] == ("untried", reason)


def test_noise_is_of_paired_differences() -> None:
    pilot, reference = build_pilot(10, 0.5), build_pilot(10, 0.75)
    gap, noise = compare_pilots([pilot], [reference])
    assert gap == pytest.approx(0.25)
    assert noise == pytest.approx(2 * (0.25 * 0.75 / SAMPLES) ** 0.5, rel=0.01)
    assert compare_pilots([reference], [reference]) == (0.0, 0.0)


def build_curve(*scores: float) -> list[Pilot]:
    return [Pilot(100, [(10 * (index + 1), score) for index, score in enumerate(scores)], [])]


RISING = [tenth / 10 for tenth in range(1, 9)] + [0.8, 0.8]


def test_crossing_has_bounds_by_the_noise_of_the_scores() -> None:
    even = build_curve(*RISING)
    noisy = build_curve(*(score + 0.03 * (-1) ** index for index, score in enumerate(RISING)))
    (low, middle, high), wide = (bound_crossing(pilots, even, 0.25) for pilots in (even, noisy))
    assert middle == pytest.approx(55)
    assert (wide[0] or 55) < (low or 0) < 55
    assert (wide[2] or 0) > (high or 100) > 55
    assert bound_crossing(build_curve(*[0.56] * 10), noisy, 0.25)[2] is None


def test_time_to_the_target_is_at_most_where_pilots_do_not_tell_more() -> None:
    race = Race({"reference": 10.0, "dense": 20.0, "good": 1.0, "same": 2.0}, {"reference": 0.8, "good": 0.8})
    search = race.search()
    search.choose()
    good = search.rows["good"]
    assert 0 < (good.low_s or 0) < (good.steps or 0) < (good.high_s or 0) < 1.1 * STEPS
    assert (search.rows["same"].status, search.rows["same"].low_s) == ("slower", None)
    search = race.search(tolerance=0.75)  # reached before the first evaluation
    search.choose()
    assert search.rows["good"].low_s is None
    assert (search.rows["good"].high_s or STEPS) < STEPS


def test_crossing_is_between_evaluations() -> None:
    curve = [(10, 0.2), (20, 0.4), (30, 0.3)]
    assert find_crossing(curve, 0.3) == pytest.approx(15)
    assert find_crossing(curve, 0.1) == pytest.approx(10)
    assert find_crossing(curve, 0.5) is None
