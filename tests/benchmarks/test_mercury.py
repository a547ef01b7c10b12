"""Mercury's benchmark: links by the paper's devices, targets, other links' times, rates, rows, and what is trained."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks.mercury.applications import APPLICATIONS, MBPS, QUADRATIC
from benchmarks.mercury.curves import Method, Target, at_the_end, on_links, smooth, times_faster
from benchmarks.mercury.methods import (
    RATES,
    WITHIN,
    best_rate,
    for_as_many_samples,
    grouped,
    mercury,
    mercury_at,
    reference,
    uniform,
)
from benchmarks.mercury.plan import scored
from benchmarks.mercury.run import NotTrained, stored
from benchmarks.mercury.variance import worth
from benchmarks.mercury.watched import Found, Point, Watched
from farflung.workloads import create_workload

pytestmark = pytest.mark.usefixtures("unframed")

TINY = Watched(QUADRATIC, steps=24, every=4)


def curve(*accuracies: float, step_s: float = 5.0, scoring: float = 0.0) -> list[Point]:
    """An accuracy every ten steps."""
    return [
        Point(10 * at, 10 * at * step_s, accuracy, 2.0 - accuracy / 100, accuracy, 10 * at * scoring)
        for at, accuracy in enumerate(accuracies, 1)
    ]


def method(*curves: list[Point], mbps: float = 10) -> Method:
    return Method(replace(TINY, mbps=mbps), list(curves))


# --- devices and links ------------------------------------------------------------------------------------------


def test_an_exchange_takes_what_the_papers_does_on_the_papers_device() -> None:
    what = APPLICATIONS["cifar10"]
    assert what.step_s == pytest.approx(3 * 32 * 1.110845e9 / 128e9, rel=1e-5)
    exchange_s = 1.5 * 4 * 11_173_962 * 8 / 10e6
    assert what.ratio(10) == pytest.approx(exchange_s / what.step_s, rel=1e-3)
    assert what.ratio(10, replicas=12) == pytest.approx(what.ratio(10) * (11 / 12) / (3 / 4), rel=1e-3)


@pytest.mark.parametrize("mbps", [10, 200])
def test_uniform_sampling_on_other_links_takes_what_it_would_when_trained_there(mbps: int) -> None:
    there = replace(TINY, mbps=mbps)
    found, wanted = TINY.points(TINY.train()), there.points(there.train())
    for one, other in zip(on_links(found, TINY.what, mbps, TINY.replicas), wanted, strict=True):
        assert one.seconds == pytest.approx(other.seconds, rel=0.02)
        assert replace(one, seconds=0.0) == replace(other, seconds=0.0)


@pytest.mark.parametrize("mbps", MBPS)
def test_groups_are_as_large_as_was_foreseen(mbps: int) -> None:
    training = mercury(QUADRATIC, mbps=mbps, every=8)
    first, *_, last = training.points(training.train())
    steps, seconds = last.steps - first.steps, last.scoring - first.scoring
    assert 3 * training.what.batch_size * seconds / steps == pytest.approx(training.what.group(mbps))


def test_a_step_waits_for_its_exchange_or_for_scoring_or_for_one_after_the_other() -> None:
    what = APPLICATIONS["cifar10"]
    points = curve(10, 20, scoring=5.0)
    fast, slow = (on_links(points, what, mbps, 4)[-1].seconds for mbps in (200, 10))
    assert fast == pytest.approx(20 * (1 + 5))
    assert slow == pytest.approx(20 * (1 + what.ratio(10)))
    after = on_links(points, what, 10, 4, sequential=True)[-1].seconds
    assert after == pytest.approx(slow + 20 * 5)


# --- targets ----------------------------------------------------------------------------------------------------


def test_a_figure_is_the_median_of_three_and_reached_by_that() -> None:
    points = curve(10, 50, 20, 40, 45)
    assert smooth([point.accuracy for point in points]) == [30, 20, 40, 40, 42.5]
    there = Target("accuracy", 40).reached(points)
    assert there is not None
    assert there.steps == 30
    assert Target("accuracy", 45).reached(points) is None
    assert Target("accuracy", 45).missed_by(points) == 2.5
    assert Target("accuracy", 40).missed_by(points) == 0.0
    assert Target("loss", 1.6).reached(points) == points[2]
    assert at_the_end(points, "accuracy") == 35


def test_what_never_reaches_the_target_counts_nothing_and_a_baseline_that_does_not_counts_its_end() -> None:
    target = Target("accuracy", 40)
    theirs, ours = curve(20, 20, 40, 40, 40), curve(40, 40, 40, step_s=2.0)
    assert times_faster(method(theirs), method(ours), target) == [150 / 20]
    assert times_faster(method(theirs), method(ours), target, "steps") == [3.0]
    assert times_faster(method(theirs), method(curve(30, 39, 39)), target) == [0.0]
    assert times_faster(method(curve(10, 10, 10)), method(ours), target) == [150 / 20]


def test_the_target_is_the_best_of_uniform_sampling_less_half_a_point() -> None:
    def ask(training: Watched) -> Found:
        accuracies = [50.0, 60.0, 60.0, 90.0, 60.0, 50.0]
        return {
            "curve": [
                [50 * at, 1.0, one + training.seed, 1.0, 70.0, 0.0] for at, one in enumerate(accuracies, 1)
            ],
            "moved": [],
        }

    found = reference(ask, TINY, (0, 1, 2))
    assert found.target == Target("accuracy", 61.0 - WITHIN), (
        "the median of three at each look, one of all seeds"
    )
    assert found.beside["training loss"].value == pytest.approx(1.05)


def test_seeds_that_never_reach_a_target_make_the_mean_infinite() -> None:
    one = method(curve(40, 40, 40), curve(10, 40, 40))
    assert one.mean_steps(Target("accuracy", 40)) == 15
    assert method(curve(40, 40, 40), curve(10, 10, 10)).mean_steps(Target("accuracy", 40)) == math.inf


def test_the_best_rate_is_the_one_that_is_there_first_or_ends_best() -> None:
    def learns(steps: dict[float, int]) -> Callable[[Watched], Found]:
        def ask(training: Watched) -> Found:
            late, rate = steps[training.learning_rate], training.learning_rate
            accuracies = [[at, at, 50.0 - rate if at >= late else 10.0, 1.0, 1.0, 0.0] for at in range(1, 9)]
            return {"curve": accuracies, "moved": []}

        return ask

    steps = dict(zip(RATES, (6, 5, 3, 4, 6), strict=True))
    assert best_rate(learns(steps), TINY, RATES, Target("accuracy", 40)) == RATES[2]
    assert best_rate(learns(steps), TINY, RATES, Target("accuracy", 60)) == RATES[4]


# --- trainings --------------------------------------------------------------------------------------------------


def test_others_take_the_training_whose_groups_are_nearest() -> None:
    assert [mercury_at("cifar10", mbps) for mbps in MBPS] == [10, 10, 10, 200]
    assert [mercury_at("speech", mbps) for mbps in MBPS] == [10, 10, 10, 200]
    assert {mercury_at("aid", mbps) for mbps in MBPS} == {10}


def test_ranks_are_looked_at_again_one_and_ten_steps_later() -> None:
    training = replace(TINY, ranked=[3, 8])
    moved = training.moved(training.train())
    assert [(one.since, one.steps) for one in moved] == [(3, 1), (8, 1), (3, 10), (8, 10)]
    assert all(0 <= small <= large <= 1 for small, large in (one.shares for one in moved))
    assert training.points(training.train()) == TINY.points(TINY.train())


def test_local_sgd_is_looked_at_behind_an_exchange_alone() -> None:
    training = replace(TINY, parts={"schedule": "local_sgd(sync_every=6)"})
    assert [point.steps for point in training.points(training.train())] == [6, 12, 18, 24]


def test_fewer_samples_are_held_and_looked_at() -> None:
    few = replace(TINY, samples=64, parts={"sampler": "grouped_importance(rule='paper', groups=1, chosen=1)"})
    last = few.points(few.train())[-1]
    assert 3 * few.what.batch_size * last.scoring / last.steps == pytest.approx(64 / few.replicas)


def test_of_a_long_tail_all_samples_of_the_first_class_are_held_and_few_of_the_last() -> None:
    task = replace(uniform("fashion"), tail=0.01)._task()
    train = task.load_datasets()[0]
    counts = train.take(torch.arange(len(train)), train=False).targets.bincount().tolist()
    whole = create_workload("fashion-mnist/mlp").load_datasets()[0]
    most = len(whole) // 10
    assert counts == [round(most * 0.01 ** (label / 9)) for label in range(10)]


def test_more_replicas_train_on_as_many_samples() -> None:
    assert for_as_many_samples("cifar10", 4) == {"steps": 2000, "every": 50}
    assert for_as_many_samples("cifar10", 8) == {"steps": 1000, "every": 25}
    assert for_as_many_samples("cifar10", 12) == {"steps": 660, "every": 15}


# --- rows -------------------------------------------------------------------------------------------------------


def test_a_training_that_is_not_stored_is_said_and_not_made() -> None:
    with pytest.raises(NotTrained, match="not stored yet"):
        stored(replace(TINY, seed=12345))


@pytest.mark.thorough
def test_nothing_has_less_variance_than_drawing_by_gradient_norms() -> None:
    first, later = worth("fashion", [1, 40])
    assert (first.steps, later.steps) == (1, 40)
    assert first.learned < later.learned
    for one in (first, later):
        assert 0 < one.by_norms <= min(one.by_loss, one.by_bound)
        assert max(one.by_loss, one.by_bound) < 1


# --- the plan ---------------------------------------------------------------------------------------------------


def test_scoring_is_counted_by_the_size_of_groups() -> None:
    assert scored(uniform("cifar10")) == 0
    assert scored(mercury("cifar10", mbps=200)) == 288
    assert scored(mercury("cifar10", parts={"sampler": grouped(128)})) == 128
    one = uniform("cifar10", parts={"sampler": "grouped_importance(rule='paper', groups=8)"})
    assert scored(one) == 50_000 / 4 / 8
    assert scored(replace(one, samples=8192)) == 256


# --- the picture ------------------------------------------------------------------------------------------------
