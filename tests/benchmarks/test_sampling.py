"""The benchmark of importance sampling: looks, trainings that stop, what is chosen by pilots, gains, and slow links."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

import pytest
import torch

from benchmarks.sampling import run
from benchmarks.sampling.gains import FACTORS, constant, factor_of_equal, gains, shortened
from benchmarks.sampling.regimes import COTTONWOOD, LEARNS, REGIMES, Regime
from benchmarks.sampling.run import OVER_PAPER, PREDICTED, over_all
from benchmarks.sampling.times import sooner
from benchmarks.sampling.training import METRICS, Found, Sampled, best, reached
from benchmarks.workloads import halved
from farflung.errors import DataError

QUICK = COTTONWOOD.quickly()
REGIME = replace(REGIMES[2], steps=1000, every=10, rates=(0.001, 0.002, 0.004))
COSINE = next(regime for regime in REGIMES if regime.schedule == "cosine")


def looks(*scores: float) -> list[list[float]]:
    return [[10 * at, score, score / 2] for at, score in enumerate(scores, 1)]


# --- looks ------------------------------------------------------------------------------------------------------------


def test_a_score_is_the_median_of_three_looks_and_later_ones_do_not_change_it() -> None:
    found = looks(10, 50, 20, 40, 45, 60)
    assert best(found) == 45
    assert reached(found, 40) == 30
    assert reached(found[:4], 40) == 30
    assert reached(found[:3], 40) is None
    assert reached(found, 20, 2) == 30, "the share that is learned"
    assert reached(found, 46) is None


def test_average_precision_is_that_of_scikit_learn() -> None:
    from sklearn.metrics import average_precision_score

    random = torch.Generator().manual_seed(0)
    logits = torch.randn(500, 2, generator=random)
    targets = (logits[:, 1] + torch.randn(500, generator=random) > 1.5).long()
    wanted = average_precision_score(targets, logits[:, 1] - logits[:, 0])
    assert METRICS["average precision"](logits, targets) == pytest.approx(wanted)


# --- trainings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stop", [{"target": 30.0}, {"learned": 0.0}])
def test_a_training_that_stops_is_the_beginning_of_one_that_goes_on(stop: dict[str, float]) -> None:
    whole = QUICK.training("pool", 0.004, 0, steps=20)
    part = replace(whole, **stop)  # type: ignore[arg-type]
    found, shorter = whole.train()["looks"], part.train()["looks"]
    there = part.reached(found)
    assert there is not None
    assert shorter == found[: len(shorter)]
    assert there < len(shorter) < len(found)


def test_only_what_a_training_stops_at_is_waited_for() -> None:
    found = looks(10, 50, 60)
    assert QUICK.training("uniform", 0.004, 0).reached(found) is None
    assert QUICK.training("uniform", 0.004, 0, target=50.0).reached(found) == 20
    assert QUICK.training("uniform", 0.004, 0, learned=50.0).reached(found) is None


# --- gains ------------------------------------------------------------------------------------------------------------


def made_up(speed: Callable[[Sampled], float], predicted: float | None = None) -> Any:
    """Trainings whose score rises by so much in a step until it is 80; they stop as they should."""
    asked = list[Sampled]()

    def ask(trainings: Sequence[Sampled]) -> list[Found]:
        asked.extend(trainings)
        return [one(training) for training in trainings]

    def one(training: Sampled) -> Found:
        seen: list[list[float]] = []
        for step in count(training.every, training.every):
            if step > training.steps or training.reached(seen[:-1]) is not None:
                break
            score = min(80.0, speed(training) * step)
            seen.append([step, score, score])
        return {"looks": seen, "predicted": [] if predicted is None else [[predicted]]}

    ask.asked = asked  # type: ignore[attr-defined]
    return ask


SPEEDS = {"uniform": 0.1, "paper": 0.2, "fill": 0.1, "half": 0.1, "pool": 0.3, "two": 0.4}


def test_each_method_has_its_own_rate_and_the_rule_is_the_one_of_the_pilots() -> None:
    """Uniform is best at another rate than others, and `two` is the best rule on the judged seeds alone."""

    def speed(training: Sampled) -> float:
        own = 0.001 if training.method == "uniform" else 0.004
        slow = training.method == "two" and training.seed in REGIME.pilots
        return (
            SPEEDS[training.method] * (1.0 if training.learning_rate == own else 0.5) * (0.5 if slow else 1)
        )

    ask = made_up(speed, predicted=3.3)
    found = constant(REGIME, ask)
    assert found.chosen == "pool"
    assert found.target == 79.5
    assert found.config["best_rate"] == {**dict.fromkeys(SPEEDS, 0.004), "uniform": 0.001}
    assert found.factors["pool"] == pytest.approx(3, rel=0.05)
    assert found.factors["paper"] == pytest.approx(2, rel=0.05)
    assert found.over_paper == pytest.approx(1.5, rel=0.05)
    assert found.misjudged == pytest.approx(abs(3.3 / found.factors["pool"] - 1))  # type: ignore[operator]
    judged = [one for one in ask.asked if one.seed in REGIME.seeds]
    assert {one.method for one in judged} == {"uniform", "paper", "pool"}
    assert all(one.target == 79.5 for one in judged)
    references = [one for one in ask.asked if one.target is None]
    assert {one.method for one in references} == {"uniform"}
    assert len(references) == len(REGIME.rates) * len(REGIME.pilots)


def test_a_rule_that_misses_the_target_on_a_seed_has_not_reached_it() -> None:
    def speed(training: Sampled) -> float:
        slow = training.method in {"pool", "two"} and training.seed == REGIME.seeds[-1]
        return 0.01 if slow else SPEEDS[training.method]

    found = constant(REGIME, made_up(speed))
    assert found.factors[found.chosen] is None
    assert found.over_paper == 0
    assert found.misjudged is None
    missed = found.measured(found.chosen).not_reached
    assert missed is not None
    assert missed["best"] < missed["target"] == 79.5
    assert found.config["steps"][found.chosen][-1] is None


def test_where_uniform_sampling_misses_the_target_its_end_counts() -> None:
    def speed(training: Sampled) -> float:
        slow = training.method == "uniform" and training.seed in REGIME.seeds
        return 0.01 if slow else SPEEDS[training.method]

    found = constant(REGIME, made_up(speed))
    (own,) = set(found.config["steps"][found.chosen])
    assert found.factors[found.chosen] == pytest.approx(REGIME.steps / own)


def test_a_share_that_is_learned_is_a_target_of_its_own() -> None:
    regime = replace(LEARNS[1], learned=70.0)
    ask = made_up(lambda training: SPEEDS[training.method])
    found = gains(regime, ask)
    assert found.target == 70
    tested = made_up(lambda training: SPEEDS[training.method])
    gains(LEARNS[0], tested)
    assert set(ask.asked) == set(tested.asked), "both rows read trainings to the last step"
    stopped = made_up(lambda training: SPEEDS[training.method])
    assert gains(replace(regime, whole=False), stopped).factors == found.factors
    assert {(one.target, one.learned) for one in stopped.asked} == {(None, None), (None, 70.0)}


def test_a_shorter_training_ends_as_accurate() -> None:
    """Accuracy grows with the steps, twice as fast with `two`; a rule is judged at its own rate."""
    ask = made_up(lambda training: 0.01 * (2 if training.method == "two" else 1))
    found = shortened(COSINE, ask)
    assert found.chosen == "two"
    assert found.factors["two"] == pytest.approx(2)
    assert found.factors["paper"] == pytest.approx(1)
    assert found.over_paper == pytest.approx(2)
    assert {one.every for one in ask.asked} == {one.steps for one in ask.asked}, "the end alone is looked at"


def test_the_factor_of_equal_accuracy() -> None:
    assert factor_of_equal([80, 79, 78, 77, 76], 80.5) is None
    assert factor_of_equal([80, 79, 78, 77, 76], 78.5) == pytest.approx(1.75)
    assert factor_of_equal([80, 79, 78, 77, 76], 76) == FACTORS[-1]


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("predicted", [None, 2.0])
def test_medians_over_rows(predicted: float | None, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = made_up(lambda training: SPEEDS.get(training.method, 0.3), predicted)
    monkeypatch.setattr(run, "_what", lambda regime, quick: (regime, ask))
    regimes: list[Regime] = [REGIME, replace(REGIME, row="another"), replace(REGIME, row="one more")]
    rows = over_all(regimes, quick=False)
    over = rows[OVER_PAPER]
    assert over.ours == pytest.approx(2, rel=0.05)
    assert over.config["rows"].keys() == {regime.row for regime in regimes}
    if predicted is None:
        assert PREDICTED not in rows, "until samplers predict"
    else:
        assert rows[PREDICTED].ours == pytest.approx(0.5, rel=0.05)


@pytest.mark.thorough
def test_scoring_is_hidden_where_links_are_slow_and_charged_where_they_are_fast() -> None:
    """A Raspberry Pi scores ten batches in about the time of three batches' steps."""
    found = constant(replace(QUICK, steps=1000, every=10), made_up(lambda training: SPEEDS[training.method]))
    row = sooner(QUICK, found)
    assert row.simulated
    assert row.ours == pytest.approx(found.factors["two"], rel=0.01)
    slow, fast = (row.config["times_sooner"][at] for at in ("10 Mbit/s", "200 Mbit/s"))
    assert 0 < fast <= slow * 1.001 <= found.factors["two"] * 1.002  # type: ignore[operator]


# --- workloads --------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_fashion_mnist_with_a_tail_and_with_wrong_labels() -> None:
    whole, test = halved.fashion().load_datasets()
    assert whole.take(torch.tensor([0]), train=True).inputs.shape == (1, 1, 14, 14)
    assert len(test) in {2000, 10_000}
    sizes = torch.bincount(halved.fashion_long_tail().load_datasets()[0].labels)  # type: ignore[arg-type]
    assert sizes[-1] / sizes[0] == pytest.approx(halved.TAIL)
    ratios = sizes[1:] / sizes[:-1]
    assert ratios.max() / ratios.min() == pytest.approx(1, rel=0.05)
    noisy = halved.fashion_noisy().load_datasets()[0]
    assert whole.labels is not None
    assert noisy.labels is not None
    wrong = float((noisy.labels != whole.labels).double().mean())
    assert wrong == pytest.approx(0.9 * halved.WRONG, abs=0.01), "a tenth of them are right by chance"
    assert torch.equal(noisy.take(torch.arange(9), train=True).targets, noisy.labels[:9])


def test_cifar10_at_half_size_is_not_augmented() -> None:
    try:
        train, test = halved.cifar10().load_datasets()
    except DataError as error:
        pytest.skip(str(error))
    ids = torch.arange(4)
    assert torch.equal(train.take(ids, train=True).inputs, train.take(ids, train=False).inputs)
    assert train.take(ids, train=True).inputs.shape == (4, 3, 16, 16)
    assert (len(train), len(test)) == (halved.FEWER, 10_000)
    assert math.isfinite(float(train.take(ids, train=True).inputs.sum()))
