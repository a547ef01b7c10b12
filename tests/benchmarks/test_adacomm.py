"""AdaComm's benchmark: links by D/Y, when a loss is reached, which rate and which schedule are best."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from benchmarks.adacomm.links import COLLECTIVE, STEP_S, links, most_per_step
from benchmarks.adacomm.race import ALLOWED, LONGER, Race, lowest, on_links, reached, smooth
from benchmarks.adacomm.run import fixed, times_faster
from benchmarks.adacomm.watched import Point, Watched
from benchmarks.common import Simulated

TINY = Watched(workload="synthetic/quadratic", steps=24, every=4, batch_size=4)


def curve(*losses: float, step_s: float = 5.0, block: int = 1) -> list[Point]:
    """A loss every ten steps."""
    return [Point(10 * at, 10 * at * step_s, loss, block) for at, loss in enumerate(losses, 1)]


# --- losses -----------------------------------------------------------------------------------------------------


def test_a_loss_is_the_median_of_three() -> None:
    points = curve(2.0, 1.0, 1.8, 1.7, 0.5)
    assert smooth(points) == [1.5, 1.8, 1.7, 1.7, 1.1]
    assert lowest(points) == 1.1
    assert reached(points, 1.7) == points[0]
    assert reached(points[1:], 1.1) == points[4]
    assert reached(points, 1.0) is None
    assert reached([], 1.0) is None


def test_a_loss_that_is_no_number_is_never_low() -> None:
    points = curve(2.0, math.nan, math.nan, math.nan)
    assert lowest(points) == math.inf
    assert reached(points, 3.0) is None


# --- links ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("unframed")
@pytest.mark.parametrize("ratio", [0.5, 4.0])
def test_a_synchronous_step_takes_its_computation_and_an_exchange(ratio: float) -> None:
    nbytes = 1_000_000
    run = Simulated(
        {"collective": COLLECTIVE, "schedule": "synchronous"}, links(ratio, nbytes), STEP_S, nbytes
    )
    assert run.period_s(2, after=1) == pytest.approx(STEP_S * (1 + ratio), rel=1e-3)


def test_on_other_links_a_fixed_period_takes_what_it_would_when_trained_there() -> None:
    for schedule in ("synchronous", fixed(4)):
        here, there = (
            one.points(one.train()) for one in (replace(TINY, schedule=schedule, ratio=r) for r in (4, 0.5))
        )
        for found, wanted in zip(on_links(here, 0.5 / 4), there, strict=True):
            assert found.seconds == pytest.approx(wanted.seconds, rel=1e-9)
            assert replace(found, seconds=0.0) == replace(wanted, seconds=0.0)


def test_no_step_is_faster_than_one_without_exchanges() -> None:
    assert most_per_step(4, 1) == 1.0
    assert most_per_step(4, 4) == 2.5
    assert most_per_step(4, 1e9) == pytest.approx(5.0)


# --- curves -----------------------------------------------------------------------------------------------------


def test_a_loss_is_looked_at_behind_an_exchange_alone() -> None:
    training = replace(TINY, schedule=fixed(6))
    points = training.points(training.train())
    assert [(point.steps, point.block) for point in points] == [(6, 6), (12, 6), (18, 6), (24, 6)]
    assert points[-1].loss < points[0].loss


def test_adacomms_blocks_become_shorter_with_the_clock() -> None:
    training = replace(TINY, schedule="adacomm(sync_every=8, interval_s=10)", steps=80, every=1)
    blocks = [point.block for point in training.points(training.train())]
    assert blocks[0] == 8
    assert blocks == sorted(blocks, reverse=True)
    assert blocks[-1] == 1


# --- races ------------------------------------------------------------------------------------------------------


class Table:
    """Trainings that have been made already, and which of them were asked for."""

    def __init__(self, losses: Callable[[Watched], Sequence[float]]) -> None:
        self._losses = losses
        self.asked: list[Watched] = []

    def __call__(self, trainings: Sequence[Watched]) -> list[list[list[float]]]:
        self.asked += trainings
        return [
            [
                [point.steps, point.seconds, point.loss, point.block]
                for point in curve(*self._losses(one), step_s=5.0 if one.schedule == "synchronous" else 2.0)
            ]
            for one in trainings
        ]

    def rates(self, schedule: str) -> set[float]:
        return {one.learning_rate for one in self.asked if one.schedule == schedule}


def falls(best: dict[str, float], slower: dict[str, int]) -> Callable[[Watched], Sequence[float]]:
    """By a tenth in each ten steps, and by less away from the best rate."""

    def losses(one: Watched) -> Sequence[float]:
        far = abs(math.log2(one.learning_rate / best[one.schedule]))
        speed = 1 / (1 + far + slower.get(one.schedule, 0))
        return [2.0 - 0.1 * speed * at for at in range(15)]

    return losses


def test_each_method_has_its_own_rate_and_the_target_is_synchronous_sgds() -> None:
    schedules = [fixed(5), fixed(20)]
    table = Table(falls({"synchronous": 0.2, schedules[0]: 0.05, schedules[1]: 0.05}, {schedules[0]: 1}))
    race = Race(Watched(learning_rate=0.1), table, (0, 1))
    assert race.synchronous.training.learning_rate == 0.2
    assert table.rates("synchronous") == {0.05, 0.1, 0.2, 0.4}
    assert race.target == pytest.approx(ALLOWED * 0.65)
    ours = race.best(schedules)
    assert (ours.training.schedule, ours.training.learning_rate) == (fixed(20), 0.05)
    assert ours.training.steps == LONGER * Watched().steps
    assert ours.seconds(race.target) == race.synchronous.seconds(race.target) * 2 / 5  # type: ignore[operator]
    given = race.best(schedules, rate=0.4, ratio=8.0)
    assert (given.training.learning_rate, given.training.ratio) == (0.4, 8.0)
    assert table.asked[-1].seed == 1


def test_what_never_reaches_the_target_is_said_so() -> None:
    race = Race(
        Watched(), Table(lambda one: [2.0, 1.0, 0.9] if one.schedule == "synchronous" else [2.0, 1.9]), (0,)
    )
    ours = race.best([fixed(100)])
    row = times_faster(race, ours, 4.0)
    assert (row.ours, row.spread) == (None, None)
    assert row.not_reached == {"best": ours.lowest, "target": race.target}
    assert row.config["times_faster_at_other_targets"][1.5] is None
    again = times_faster(race, race.synchronous, 4.0)
    assert (again.ours, again.config["exchange_s"]) == (1.0, 4.0)
    assert again.not_reached is None


# --- the whole --------------------------------------------------------------------------------------------------
