"""Which methods count as equally accurate, and where the milliseconds of a step are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from benchmarks.common.meter import MAIN, Meter
from benchmarks.compression_pays.accuracy import RATES, SEEDS, TIGHTER, Equality, Hooked
from benchmarks.compression_pays.methods import SYNCHRONOUS
from farflung.comm import ExchangeChannel
from farflung.sim import VirtualWorld


class Table:
    """Trainings that have been made already, and which of them were asked for."""

    def __init__(self, accuracy: Callable[[Hooked], float]) -> None:
        self._accuracy = accuracy
        self.asked: list[Hooked] = []

    def curves(self, trainings: Sequence[Hooked]) -> list[list[tuple[int, float]]]:
        self.asked += trainings
        return [[(one.steps, self._accuracy(one))] for one in trainings]

    def rates(self, method: str) -> list[float]:
        return [one.learning_rate for one in self.asked if one.method == method and one.seed == SEEDS[0]]


def best_at(places: dict[str, tuple[float, float]]) -> Callable[[Hooked], float]:
    """The accuracy of each method at its best rate, two points less for each place on the grid farther away."""

    def accuracy(one: Hooked) -> float:
        rate, best = places[one.method]
        return best - 2.0 * abs(RATES.index(one.learning_rate) - RATES.index(rate)) - 0.1 * one.seed

    return accuracy


@pytest.mark.parametrize(
    ("rate", "tried"),
    [
        (0.025, [0.025, 0.0125, 0.05]),
        (0.05, [0.025, 0.0125, 0.05, 0.1]),
        (0.0125, [0.025, 0.0125, 0.05]),
        (RATES[-1], [0.025, 0.0125, 0.05, 0.1, 0.2, 0.4, 0.8]),
    ],
)
def test_a_rate_is_sought_until_its_neighbours_are_worse(rate: float, tried: list[float]) -> None:
    table = Table(best_at({SYNCHRONOUS: (rate, 50.0)}))
    equality = Equality(table)  # type: ignore[arg-type]
    assert equality.holds(SYNCHRONOUS)
    assert table.rates(SYNCHRONOUS) == tried
    learned = equality.learned[SYNCHRONOUS]
    assert (learned.rate, len(learned.accuracies)) == (rate, len(SEEDS))
    assert learned.mean == pytest.approx(49.9)


@pytest.mark.parametrize(("best", "holds", "seeds"), [(49.1, True, 3), (48.9, False, 3), (45.0, False, 1)])
def test_equal_is_within_a_point_of_synchronous_each_at_its_own_rate(
    best: float, holds: bool, seeds: int
) -> None:
    table = Table(best_at({SYNCHRONOUS: (0.1, 50.0), "int8": (0.4, best)}))
    equality = Equality(table)  # type: ignore[arg-type]
    assert equality.holds("int8") is holds
    assert len(equality.learned["int8"].accuracies) == seeds
    before = len(table.asked)
    assert equality.holds("int8") is holds
    assert len(table.asked) == before


def test_a_method_far_behind_at_the_first_rate_is_tried_at_no_other() -> None:
    table = Table(best_at({SYNCHRONOUS: (0.025, 50.0), "sign": (0.025, 39.9), "int8": (0.025, 40.1)}))
    equality = Equality(table)  # type: ignore[arg-type]
    assert not equality.holds("sign")
    assert not equality.holds("int8")
    assert (len(table.rates("sign")), len(table.rates("int8"))) == (1, 3)


@pytest.mark.parametrize(("looser", "trained"), [(48.0, 0), (49.5, 5)])
def test_a_tighter_setting_is_tried_where_the_looser_one_is_equal(looser: float, trained: int) -> None:
    one = "sign, error feedback, in two phases"
    other = TIGHTER[one]
    table = Table(best_at({SYNCHRONOUS: (0.025, 50.0), other: (0.025, looser), one: (0.025, 49.5)}))
    assert Equality(table).holds(one) is bool(trained)  # type: ignore[arg-type]
    assert sum(training.method == one for training in table.asked) == trained


def test_a_meter_tells_threads_apart_and_what_exchanges_compute() -> None:
    meter = Meter()
    before, plain = meter.read(), ExchangeChannel.charge
    channel = ExchangeChannel(VirtualWorld(1).runtimes[0].comm, 1, 0)
    with meter.stopwatch():
        channel.charge("encode", 8, "int8")
        assert sum(range(100_000)) == 4999950000
        channel.reserve_hops(1)
        added = meter.since(before)
        assert 0 < added["coding: encode"] <= added[MAIN]
        assert sum(range(100_000)) == 4999950000  # nothing has been charged for it
        channel.reserve_hops(1)
        assert meter.since(before)["coding: encode"] == added["coding: encode"]
    assert ExchangeChannel.charge is plain
