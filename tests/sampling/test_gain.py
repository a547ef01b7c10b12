"""What drawing by scores is predicted to be worth, against distributions of gradients that are known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

from farflung.config import Training
from farflung.data.datasets import TensorDataset
from farflung.errors import ConfigError
from farflung.loop import Replica
from farflung.recipes import parse_recipe
from farflung.runs import make_replica
from farflung.sampling import Gain
from farflung.sampling.gain import MIN_STEPS, NOISE_NAMES
from farflung.sampling.importance import (
    compute_inclusion,
    compute_second_moments,
    draw_systematic,
    smooth_scores,
)
from farflung.sampling.scoring import ScoringSampler
from farflung.sim import LinkModel, VirtualWorld
from farflung.telemetry import Telemetry
from farflung.types import Dataset, Decision
from farflung.workloads import Quadratic
from tests.covering import thorough

SIZES = torch.randn(4000, generator=torch.Generator().manual_seed(1)).double().mul(1.2).exp()
"""The norms of samples' gradients."""
DIM, B, M = 50, 8, 80
WAYS = torch.nn.functional.normalize(
    torch.randn(4000, DIM, generator=torch.Generator().manual_seed(2)).double(), dim=1
)
GRADIENTS = SIZES[:, None] * WAYS + 0.5 * torch.ones(DIM) / DIM**0.5
"""One for each sample: the mean is short beside them."""


def known(replicas: int) -> tuple[float, float]:
    """The noise scale of uniform batches over all replicas, and the second moment under the norms over theirs."""
    mean = GRADIENTS.mean(0).square().sum()
    spread = GRADIENTS.square().sum(1).mean() - mean
    norms = GRADIENTS.norm(dim=1)
    return float(spread / (replicas * B * mean)), float(norms.mean() ** 2 / norms.square().mean())


def of_batch(generator: torch.Generator, *, scored: bool) -> tuple[Tensor, tuple[float, float, float]]:
    """A replica's gradient, and what its candidates' scores say."""
    rows = torch.randint(len(GRADIENTS), (M,), generator=generator)
    norms, ones = GRADIENTS[rows].norm(dim=1), torch.ones(M).double()
    importances = smooth_scores(norms, 0.02)
    moments = compute_second_moments(norms, importances, ones)
    if not scored:
        return GRADIENTS[rows[:B]].mean(0), moments
    expected = compute_inclusion(importances, B)
    drawn = draw_systematic(expected, generator)
    weights = B / (M * expected[drawn])
    return (weights[:, None] * GRADIENTS[rows[drawn]]).mean(0), moments


def steps(gains: list[Gain], count: int, weights: Tensor, *, scored: bool, seed: int = 0) -> None:
    """Steps of several replicas whose gradients are summed with weights."""
    generator, shares = torch.Generator().manual_seed(seed), weights / weights.sum()
    for _ in range(count):
        found = [of_batch(generator, scored=scored) for _ in gains]
        mean = sum(float(share) * own for share, (own, _) in zip(shares, found, strict=True))
        assert isinstance(mean, Tensor)
        for rank, (gain, (own, moments)) in enumerate(zip(gains, found, strict=True)):
            gain.record_moments(moments, B / M)
            square = float(mean.square().sum())
            gain.record_norms(float(own.square().sum()), square, float(shares[rank]), is_rank_0=rank == 0)
        learned = [gain.drain() for gain in gains]
        sums = {name: sum(each[name] for each in learned) for name in learned[0]}
        assert len({gain.update_rule(sums) for gain in gains}) == 1


def begun(rule: str, count: int) -> list[Gain]:
    gains = [Gain(rule) for _ in range(count)]
    for gain in gains:
        gain.begin_run("")
    return gains


@pytest.mark.parametrize("replicas", [2, *thorough(4)])
def test_noise_and_gain_are_those_of_the_distribution(replicas: int) -> None:
    noise, ratio = known(replicas)
    gains = begun("auto", replicas)
    steps(gains, MIN_STEPS - 1, torch.ones(replicas), scored=False)
    effective = ratio + (1 - ratio) * B / M
    assert gains[0].noise_scale == pytest.approx(noise, rel=0.25)
    assert gains[0].ratio == pytest.approx(effective, rel=0.15)
    assert gains[0].gain == pytest.approx((1 + noise) / (1 + effective * noise), rel=0.1)
    assert gains[0].rule == "uniform"


@pytest.mark.parametrize("replicas", [2, *thorough(4)])
def test_the_same_is_measured_while_batches_are_drawn_by_scores(replicas: int) -> None:
    """So a choice does not undo itself."""
    noise, ratio = known(replicas)
    gains = begun("pool", replicas)
    steps(gains, 300, torch.ones(replicas), scored=True)
    effective = ratio + (1 - ratio) * B / M
    assert gains[0].noise_scale == pytest.approx(noise, rel=0.25)
    assert gains[0].gain == pytest.approx((1 + noise) / (1 + effective * noise), rel=0.1)


def test_shares_of_unlike_weight_are_reckoned_with() -> None:
    """As many samples each, so the mean has more noise than by equal weights."""
    weights = torch.tensor([3.0, 1.0, 1.0, 1.0])
    gains = begun("pool", 4)
    steps(gains, 300, weights, scored=False)
    noise, _ = known(4)
    noise *= 4 * float((weights / weights.sum()).square().sum())
    found = gains[0].noise_scale
    assert found is not None
    assert found * gains[0].ratio == pytest.approx(noise, rel=0.25)


# --- choices ------------------------------------------------------------------------------------------------------


def told(gain: Gain, *, noise: float, rho: float = 0.2, part: float = 0.1) -> bool:
    """A step of four replicas with a mean gradient of square 1."""
    ratio = 1.0 if gain.rule == "uniform" else (1 - part) * rho + part
    variance = noise * ratio
    sums = {"spread": 3 * variance, "square": 1 + variance, "shares": 0.25}
    return gain.update_rule({**sums, "first": part, "second": (1 - part) * rho, "uniform": 1.0, "pool": part})


def test_it_turns_on_and_off_with_hysteresis() -> None:
    (gain,) = begun("auto", 1)

    def go(noise: float, count: int = 1500) -> list[int]:
        return [step for step in range(count) if told(gain, noise=noise)]

    def worth(noise: float, effective: float = 0.28) -> float:
        return (1 + noise) / (1 + effective * noise)

    assert worth(0.1) < 1.1
    assert go(0.1) == []
    assert gain.gain == pytest.approx(worth(0.1))
    (gain,) = begun("auto", 1)
    assert go(0.5) == [MIN_STEPS - 1], "as soon as it may"
    assert gain.rule == "pool"
    assert 1.05 < worth(0.1) < 1.1
    assert go(0.1) == [], "not in between"
    assert worth(0.05) < 1.05
    assert len(go(0.05)) == 1
    assert gain.rule == "uniform"
    assert go(0.1) == []


def test_few_that_matter_are_looked_for_among_all() -> None:
    (gain,) = begun("auto", 1)
    for _ in range(MIN_STEPS):
        told(gain, noise=2.0, rho=0.05)
    assert gain.rule == "two"
    for _ in range(2 * MIN_STEPS):
        told(gain, noise=2.0, rho=0.15)
    assert gain.rule == "two", "until twice as many do"
    for _ in range(10 * MIN_STEPS):
        told(gain, noise=2.0, rho=0.4)
    assert gain.rule == "pool"
    (gain,) = begun("auto", 1)
    gain.is_streaming = True
    for _ in range(MIN_STEPS):
        told(gain, noise=2.0, rho=0.05)
    assert gain.rule == "pool", "a stream holds those that have arrived"


@pytest.mark.parametrize(("times", "rule"), [(1.5, "two"), (2.5, "pool")])
def test_two_is_given_up_where_the_variance_is_not_what_scores_predict(times: float, rule: str) -> None:
    (gain,) = begun("auto", 1)
    for _ in range(MIN_STEPS):
        told(gain, noise=8.0, rho=0.05)
    assert gain.rule == "two"
    for _ in range(MIN_STEPS):
        told(gain, noise=8.0 * times, rho=0.05)
    assert gain.rule == rule
    for _ in range(4 * MIN_STEPS):
        told(gain, noise=8.0 * times, rho=0.05)
    assert gain.rule == rule, "and not taken again soon"


def test_what_is_chosen_stays_where_it_cannot_be_known() -> None:
    for rule, stays in {"auto": "uniform", "pool": "pool", "two": "two"}.items():
        gain = Gain(rule)
        assert gain.begin_run("one replica") == ()
        gain.record_norms(2.0, 1.0, 0.5, is_rank_0=True)
        assert gain.drain() == {}
        for _ in range(300):
            assert not gain.update_rule({})
        assert gain.rule == stays
        assert not gain.should_score(0)
        assert gain.report() == {
            "steps": {"uniform": 0, "pool": 0, "two": 0},
            "gain": None,
            "noise_scale": None,
            "undefined": "one replica",
        }


def test_a_mean_gradient_that_is_lost_in_noise_has_no_scale_and_the_largest_gain() -> None:
    (gain,) = begun("pool", 1)
    for _ in range(10):
        gain.update_rule(
            {
                **dict.fromkeys(NOISE_NAMES, 0.25),
                "spread": 9.0,
                "first": 0.1,
                "second": 0.1,
                "uniform": 1,
                "pool": 0.1,
            }
        )
    assert gain.noise_scale is None
    assert gain.gain == pytest.approx(5)


def test_it_goes_on_from_its_state() -> None:
    (one,), (other,) = begun("auto", 1), begun("auto", 1)
    for _ in range(MIN_STEPS + 50):
        told(one, noise=0.6)
    other.load_state_dict(one.state_dict())
    for gain in (one, other):
        for step in range(400):
            told(gain, noise=0.6 if step < 50 else 0.01)
    assert one.state_dict() == other.state_dict()
    assert one.rule == "uniform"


# --- in a run -----------------------------------------------------------------------------------------------------


class Rare(Quadratic):
    """One sample in twenty is far from all others."""

    @override
    def load_datasets(self) -> tuple[Dataset, Dataset]:
        train, test = super().load_datasets()
        assert isinstance(train, TensorDataset)
        inputs = train.inputs.clone()
        inputs[::20] *= 30
        return TensorDataset(inputs, train.targets, train.targets), test


def run(
    sampler: str, steps: int = 130, workers: int = 3, **parts: Any
) -> tuple[list[Replica], list[Decision]]:
    world = VirtualWorld(workers, LinkModel(0.1))
    replicas = [
        make_replica(
            runtime,
            Rare(dim=6, samples=600),
            parse_recipe("synchronous").with_components(sampler=sampler, **parts),
            Training(steps, 4, 0.01, seed=3),
            Telemetry(rank),
            shares=[*torch.arange(600).tensor_split(workers)],
        )
        for rank, runtime in enumerate(world.runtimes)
    ]
    world.run([replica.run() for replica in replicas])
    return replicas, [each for each in world.decisions.entries if each.name == "sampling"]


def gain_of(replica: Replica) -> Gain:
    assert isinstance(replica.sampler, ScoringSampler)
    assert replica.sampler.gain is not None
    return replica.sampler.gain


@pytest.mark.parametrize(
    "parts", [{"schedule": "pipelined(width=2)"}, *thorough({}, {"codec": "truncate16"})], ids=str
)
def test_replicas_choose_alike_and_the_choice_is_a_decision_of_the_run(parts: dict[str, Any]) -> None:
    replicas, decided = run("grouped_importance(scored_by='loss')", bucket_nbytes=16, **parts)
    assert {gain_of(replica).rule for replica in replicas} <= {"pool", "two"}
    learned = [{**gain_of(replica).state_dict(), "pending": None, "steps": None} for replica in replicas]
    assert learned[0] == learned[1] == learned[2]
    assert [(each.value, each.rank, each.timing) for each in decided] == [
        (gain_of(replicas[0]).rule, None, False)
    ]
    assert abs(decided[0].step - MIN_STEPS) <= 2


def test_what_is_measured_is_the_noise_of_gradients() -> None:
    """One bucket or many."""
    (one, *_), _ = run("grouped_importance(rule='pool')", 30)
    (other, *_), _ = run("grouped_importance(rule='pool')", 30, bucket_nbytes=1)
    assert gain_of(one).noise_scale == pytest.approx(gain_of(other).noise_scale)


@pytest.mark.parametrize(
    ("parts", "why"),
    [
        ({"workers": 1}, "one replica"),
        ({"schedule": "delayed(2)"}, "replicas' parameters differ under Delayed"),
        ({"schedule": "local_sgd(2)"}, "replicas' parameters differ under LocalSGD"),
        ({"codec": "error_feedback(topk(0.5))"}, "ErrorFeedback changes gradients"),
        ({"reducer": "powersgd(rank=1)"}, "PowerSGD changes gradients"),
    ],
    ids=str,
)
def test_where_gradients_do_not_compare_it_is_uniform_scores_nothing_and_says_so(
    parts: dict[str, Any], why: str
) -> None:
    replicas, decided = run("grouped_importance", 110, **{"workers": 2, **parts})
    assert not decided
    for replica in replicas:
        assert gain_of(replica).report()["undefined"] == why
        assert gain_of(replica).report()["steps"] == {"uniform": 110, "pool": 0, "two": 0}
        assert replica.time_s.scoring == 0


def test_while_uniform_a_batch_is_scored_in_every_twentieth_step() -> None:
    (replica, *_), _ = run("grouped_importance", 60)
    told = replica.components.sampler.state_dict()
    assert int((told["scores"] >= 0).sum()) == 4 * 3


def test_of_streams_scores_are_drawn_by_once_that_is_worth_it_and_never_from_all() -> None:
    stream = "rate(100, least=4, most=40, backlog=40, full='drop_oldest')"
    replicas, decided = run("grouped_importance(scored_by='loss')", 140, stream=stream)
    assert [each.value for each in decided] == ["pool"]
    for replica in replicas:
        assert gain_of(replica).steps["uniform"] >= MIN_STEPS
        assert gain_of(replica).steps["two"] == 0
    with pytest.raises(ConfigError, match="stream holds those that have arrived"):
        run("grouped_importance(rule='two')", 3, stream=stream)
