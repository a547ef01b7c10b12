"""The choice rules recipes out by gaps that exceed their noise, and chooses the earliest of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch

from farflung.planning.choice import Gap, Outcome, Pilot, Search, compare_pilots, find_crossing

STEPS, SAMPLES = 1200, 400


def build_pilot(steps: int, score: float, *, noisy: int = 0) -> Pilot:
    """A pilot whose score rises evenly; of ``noisy`` samples, half are right where the reference is wrong."""
    scores = torch.zeros(SAMPLES)
    scores[noisy : noisy + round(score * SAMPLES)] = 1.0
    curve = [(steps * tenth // 10, score * tenth / 10) for tenth in range(1, 11)]
    return Pilot(steps, curve, scores)


class Race:
    """Candidates with a time of a step and a score at the end of any pilot."""

    def __init__(self, step_s: Mapping[str, float], scores: Mapping[str, float], noisy: int = 0) -> None:
        self.step_s, self.scores, self.noisy = step_s, scores, noisy
        self.trained: list[tuple[str, int]] = []

    def train(self, name: str, steps: int) -> list[Pilot]:
        self.trained.append((name, steps))
        return [build_pilot(steps, self.scores[name], noisy=0 if name == "reference" else self.noisy)]

    def search(self) -> Search:
        def compute_seconds(name: str, steps: int) -> float:
            return steps * self.step_s[name]

        return Search(STEPS, 0.25, STEPS, "reference", ["dense"], compute_seconds, self.train, tolerance=0.05)


def test_fastest_recipe_within_the_tolerance_wins_and_slower_ones_need_no_pilot() -> None:
    race = Race(
        {"reference": 10.0, "dense": 20.0, "fast": 1.0, "good": 2.0, "slow": 8.0},
        {"reference": 0.8, "fast": 0.5, "good": 0.8, "slow": 0.9},
    )
    outcomes = race.search().choose([*race.step_s])
    assert {name: outcome.status for name, outcome in outcomes.items()} == {
        "reference": "reaches",
        "dense": "reaches",
        "fast": "misses",
        "good": "reaches",
        "slow": "slower",
    }
    assert race.trained == [
        ("fast", 100), ("reference", 100), ("good", 100), ("good", 300), ("reference", 300)
    ]  # fmt: skip
    assert outcomes["good"].steps == pytest.approx(0.75 / 0.8 * STEPS, abs=1)
    assert outcomes["good"].max_steps == STEPS


def test_gap_within_its_noise_is_no_veto_but_a_longer_pilot() -> None:
    race = Race({"reference": 10.0, "dense": 20.0, "near": 1.0}, {"reference": 0.8, "near": 0.74}, noisy=100)
    search = race.search()
    assert search.choose([*race.step_s])["near"].status == "misses"
    assert ("near", 600) in race.trained
    race.scores = {**race.scores, "near": 0.76}
    search = race.search()
    near = search.choose([*race.step_s])["near"]
    assert near.status == "reaches"
    assert near.max_steps is None


def test_short_pilots_allow_twice_the_tolerance() -> None:
    race = Race({"reference": 10.0, "dense": 20.0, "late": 1.0}, {"reference": 0.8, "late": 0.71})
    assert race.search().choose([*race.step_s])["late"].status == "misses"
    assert ("late", 300) in race.trained


def test_budget_ends_the_search_and_long_blocks_are_not_tried() -> None:
    race = Race(
        {"reference": 10.0, "dense": 20.0, "blocks": 0.5, "fast": 1.0, "good": 2.0},
        {"reference": 0.8, "fast": 0.5, "good": 0.8},
    )
    search = replace(race.search(), budget_steps=150, min_steps={"blocks": 301})
    outcomes = search.choose([*race.step_s])
    assert outcomes["blocks"] == Outcome("untried", "its blocks are too long for pilots of 300 steps")
    assert outcomes["good"] == Outcome("untried", "the budget is spent")
    assert outcomes["reference"].status == "reaches"


def test_time_is_an_interval_only_if_the_pilot_was_long_enough() -> None:
    assert Outcome("misses").bound_seconds(float) is None
    low, high = Outcome("reaches", steps=60, max_steps=100).bound_seconds(float) or (0.0, 0.0)
    assert low is None
    assert high == pytest.approx(110)
    low, high = Outcome("reaches", steps=100).bound_seconds(float) or (0.0, 0.0)
    assert low == pytest.approx(63)
    assert high == pytest.approx(110)


def test_noise_is_of_paired_differences() -> None:
    pilot, reference = build_pilot(10, 0.5), build_pilot(10, 0.75)
    gap = compare_pilots([pilot], [reference])
    assert gap.mean == pytest.approx(0.25)
    assert gap.noise == pytest.approx(2 * (0.25 * 0.75 / SAMPLES) ** 0.5, rel=0.01)
    assert compare_pilots([reference], [reference]) == Gap(0.0, 0.0)


def test_crossing_is_between_evaluations() -> None:
    curve = [(10, 0.2), (20, 0.4), (30, 0.3)]
    assert find_crossing(curve, 0.3) == pytest.approx(15)
    assert find_crossing(curve, 0.1) == pytest.approx(10)
    assert find_crossing(curve, 0.5) is None
