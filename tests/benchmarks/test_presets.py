"""The presets on language: which are compared, at which rates, when their steps end, and how they are shown."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.presets.courses import (
    SEARCHED,
    Course,
    Point,
    best_rate,
    courses_of,
    first_at,
    lowest,
    target,
)
from benchmarks.presets.language import Curve, Language
from benchmarks.presets.methods import NETWORKS, RATES, REFERENCE, parts_of
from benchmarks.presets.times import Pace, Paces, _phases, _simulated

SMALL = Language("synchronous", 0.001, "four-regions", steps=200, workload="synthetic/quadratic")


def course(preset: str, *losses: float, sent: int = 10, networks: tuple[str, ...] = NETWORKS) -> Course:
    points = [
        Point(100 * place, loss, sent * place, dict.fromkeys(networks, 60.0 * place))
        for place, loss in enumerate(losses, 1)
    ]
    return Course(preset, networks, 0.001, {"0.001": losses[-1]}, points)


# --- what is compared -------------------------------------------------------------------------------------------


# --- rates ------------------------------------------------------------------------------------------------------


def trained_best_at(rates: dict[str, float]) -> tuple[Callable[[Language], Curve], list[Language]]:
    """Losses that rise with the distance from a rate, and what was asked for."""
    asked: list[Language] = []

    def train(one: Language) -> Curve:
        asked.append(one)
        return [(2000, 1.0 + abs(math.log(one.learning_rate / rates[one.preset])), 1, 0.0)]

    return train, asked


@pytest.mark.parametrize(
    ("preset", "best", "found", "tried"),
    [
        (REFERENCE, 0.001, 0.001, [0.0005, 0.001, 0.002]),
        (REFERENCE, 0.004, 0.004, [0.0005, 0.001, 0.002, 0.004, 0.008]),
        (REFERENCE, 0.5, RATES[-1], [0.0005, *RATES[3:]]),
        ("ring", 0.0005, 0.002, []),
        ("dga", 0.004, 0.002, [0.001, 0.002]),
        ("dga", 0.0005, 0.0005, [0.00025, 0.0005, 0.001, 0.002]),
        ("demo", 0.0005, 0.0005, [0.00025, 0.0005, 0.001, 0.002]),
    ],
)
def test_rates_are_searched_for_as_long_as_that_is_better(
    preset: str, best: float, found: float, tried: list[float]
) -> None:
    train, asked = trained_best_at({REFERENCE: 0.002, preset: best})
    rate, losses = best_rate(train, preset, "")
    assert rate == found
    assert [float(one) for one in losses] == tried
    assert sorted(one.learning_rate for one in asked if one.preset == preset) == tried
    assert all(one.steps == (2000 if one.preset == REFERENCE else SEARCHED) for one in asked)


def test_what_hangs_on_times_is_trained_on_each_network_at_the_rate_of_the_first() -> None:
    train, asked = trained_best_at({REFERENCE: 0.001, "delayed": 0.0005})
    courses = courses_of("delayed", train=train)
    assert [one.networks for one in courses] == [(network,) for network in NETWORKS]
    assert {one.learning_rate for one in courses} == {0.0005}
    own = [one for one in asked if one.preset == "delayed"]
    assert {one.network for one in own} == set(NETWORKS)
    assert {one.learning_rate for one in own if one.network != NETWORKS[0]} == {0.0005}


# --- targets ----------------------------------------------------------------------------------------------------


def test_a_target_is_reached_by_the_median_of_three_evaluations() -> None:
    reference = course(REFERENCE, 3.0, 2.0, 1.8, 1.9, 1.7)
    wanted = target(reference, 0.05)
    assert wanted == pytest.approx(1.85)
    there = first_at(reference, wanted)
    assert there is not None
    assert there.steps == 400
    never = course("dga", 3.0, 1.0, 3.0, 2.0, 2.0)
    assert first_at(never, wanted) is None
    assert lowest(never) == pytest.approx(wanted + 0.15)


# --- times ------------------------------------------------------------------------------------------------------


def test_steps_that_were_not_simulated_take_as_long_as_the_last_blocks() -> None:
    pace = Pace(
        [5.0, 6.0, 7.0, 10.0, 11.0, 14.0, 15.0], window=4, repeats_from=2, steps=100, flush_s=3.0, sent=8
    )
    assert [pace.end_s(step) for step in (0, 1, 7, 8, 9, 10, 11, 12)] == [0, 5, 15, 18, 19, 22, 23, 26]
    whole = Paces([pace, replace(pace, steps=10)], [])
    assert whole.end_s(100) == pace.end_s(100)
    assert whole.end_s(109) == pace.end_s(100) + pace.end_s(9)
    assert whole.end_s(110) == pace.end_s(100) + pace.end_s(10) + 3.0
    assert whole.sent_a_step == 2


@pytest.mark.parametrize(
    "preset", ["synchronous", "pipe_sgd", "dga", "local_sgd", "diloco", "streaming_diloco"]
)
def test_simulating_some_steps_tells_when_all_would_end(preset: str) -> None:
    training = replace(SMALL, preset=preset, steps=230)
    told = _simulated(training, parts_of(preset), training.steps)
    pace = Pace(**told["pace"])
    assert len(pace.ends_s) < training.steps
    found = {steps: seconds for steps, _, _, seconds in training.train()}
    for steps, seconds in found.items():
        assert Paces([pace], []).end_s(steps) == pytest.approx(seconds, rel=0.01)


def test_a_schedule_that_changes_is_timed_in_two_parts() -> None:
    (first, until), (later, rest) = _phases("post_local_sgd", 2000)
    assert (first["schedule"], until) == ("synchronous", 1000)
    assert (later["schedule"], rest) == ("local_sgd(sync_every=16)", 1000)
    assert [steps for _, steps in _phases("post_local_sgd", 50)] == [50]


# --- trainings --------------------------------------------------------------------------------------------------


def test_a_training_counts_bytes_of_all_replicas_and_evaluates_on_its_way() -> None:
    curve = replace(SMALL, network="").train()
    assert [steps for steps, *_ in curve][-1] == 200
    assert len(curve) == 11
    sent = [sent for _, _, sent, _ in curve]
    assert sent[-1] == pytest.approx(sent[3] * 2)
    assert {seconds for *_, seconds in curve} == {0.0}


# --- pictures ---------------------------------------------------------------------------------------------------
