"""What importance sampling computes: weights, their bound, what they are worth, and draws by them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from farflung.sampling.importance import (
    ScoreRenewal,
    compute_importance_weights,
    compute_inclusion,
    compute_quantiles,
    compute_rank_changes,
    compute_variance_ratio,
    draw_systematic,
    draw_with_replacement,
    draw_without_replacement,
    smooth_scores,
    split_quotas,
)

SCORES = st.lists(st.floats(0, 2.0**40, width=32), min_size=1, max_size=30).map(torch.tensor)


def random(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# --- weights ----------------------------------------------------------------------------------------------------


@given(scores=SCORES, smoothing=st.floats(0.01, 8))
def test_weights_have_their_bound_and_make_the_mean_of_a_group(scores: Tensor, smoothing: float) -> None:
    importances = smooth_scores(scores, smoothing)
    weights = compute_importance_weights(importances)
    assert float(weights.max()) <= (1 + smoothing) / smoothing * (1 + 1e-9)
    assert float(weights.min()) > 0
    q = importances / importances.sum()
    assert torch.allclose(q * weights, torch.full_like(q, 1 / len(scores)), rtol=1e-9)


def test_smoothing_adds_a_part_of_the_mean() -> None:
    assert smooth_scores(torch.tensor([0.0, 1.0, 5.0]), 0.5).tolist() == [1.0, 2.0, 6.0]
    assert compute_importance_weights(torch.tensor([1.0, 2.0, 6.0])).tolist() == [3.0, 1.5, 0.5]


def test_scores_of_zero_alone_leave_it_uniform() -> None:
    assert smooth_scores(torch.zeros(4), 0.5).tolist() == [1.0] * 4
    assert compute_importance_weights(smooth_scores(torch.zeros(4), 0.5)).tolist() == [1.0] * 4


# --- what they are worth ----------------------------------------------------------------------------------------


def moments(gradients: Tensor, q: Tensor) -> tuple[float, float]:
    """The trace of the covariance of a drawn sample's weighted gradient, and its second moment, term by term."""
    weighted = gradients / (len(gradients) * q).unsqueeze(1)
    second = (q * weighted.square().sum(1)).sum()
    mean = (q.unsqueeze(1) * weighted).sum(0)
    assert torch.allclose(mean, gradients.mean(0)), "unbiased"
    return float(second - mean.square().sum()), float(second)


@given(seed=st.integers(0, 1000), smoothing=st.floats(0, 3), spread=st.floats(0.1, 3))
def test_drawing_by_gradient_norms_has_a_smaller_variance_than_uniform(
    seed: int, smoothing: float, spread: float
) -> None:
    generator = random(seed)
    sizes = (spread * torch.randn(12, 1, dtype=torch.float64, generator=generator)).exp()
    gradients = sizes * torch.randn(12, 3, dtype=torch.float64, generator=generator)
    norms = gradients.norm(dim=1)
    importances = smooth_scores(norms, smoothing)
    by_norm, second = moments(gradients, importances / importances.sum())
    uniform, plain = moments(gradients, torch.full((12,), 1 / 12, dtype=torch.float64))
    assert by_norm < uniform
    assert compute_variance_ratio(norms, smooth_scores(norms, smoothing)) == pytest.approx(second / plain)


@given(scores=SCORES, smoothing=st.floats(0, 8))
def test_less_smoothing_is_worth_more_and_none_the_most(scores: Tensor, smoothing: float) -> None:
    assume(bool((scores > 0).any()))
    ratio = compute_variance_ratio(scores, smooth_scores(scores, smoothing))
    best = float(scores.double().mean() ** 2 / (scores.double() ** 2).mean())
    assert best * (1 - 1e-9) <= ratio <= 1 + 1e-9
    assert compute_variance_ratio(scores, smooth_scores(scores, 0.0)) == pytest.approx(best)
    assert compute_variance_ratio(scores, smooth_scores(scores, smoothing + 1)) >= ratio * (1 - 1e-9)


def test_drawing_against_the_norms_is_worse_than_uniform() -> None:
    assert compute_variance_ratio(torch.tensor([1.0, 3.0]), torch.tensor([3.0, 1.0])) > 1


def test_the_variance_ratio_of_nothing_is_that_of_uniform() -> None:
    assert compute_variance_ratio(torch.zeros(3), torch.ones(3)) == 1
    assert compute_variance_ratio(torch.empty(0), torch.empty(0)) == 1


# --- drawing ----------------------------------------------------------------------------------------------------

SIZES = st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any).map(torch.tensor)


@given(sizes=SIZES, total=st.integers(0, 200), seed=st.integers(0, 100))
def test_quotas_sum_up_and_are_shares_rounded_up_or_down(sizes: Tensor, total: int, seed: int) -> None:
    found = split_quotas(total, sizes, random(seed)).tolist()
    assert sum(found) == total
    whole = int(sizes.sum())
    for quota, size in zip(found, sizes.tolist(), strict=True):
        assert total * size // whole <= quota <= -(-total * size // whole)


def test_quotas_expect_to_be_the_shares() -> None:
    sizes, total, tries = torch.tensor([1, 5, 4, 7]), 8, 4000
    generator = random()
    mean = torch.stack([split_quotas(total, sizes, generator) for _ in range(tries)]).double().mean(0)
    assert torch.allclose(mean, total * sizes.double() / 17, atol=4 * 0.5 / math.sqrt(tries))


def test_draws_with_replacement_go_by_importance() -> None:
    importances, tries = torch.tensor([0.0, 1.0, 0.0, 3.0, 6.0, 0.0]), 20_000
    found = torch.bincount(draw_with_replacement(importances, tries, random()), minlength=6) / tries
    wanted = importances / 10
    assert bool((found[wanted == 0] == 0).all())
    assert bool(((found - wanted).abs() <= 4 * (wanted * (1 - wanted) / tries).sqrt()).all())


def test_the_least_random_number_there_is_draws_nothing_of_no_importance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "rand", lambda count, **_: torch.zeros(count, dtype=torch.float64))
    assert draw_with_replacement(torch.tensor([0.0, 0.0, 2.0, 1.0]), 2, random()).tolist() == [2, 2]


def test_draws_without_replacement_go_by_importance_among_those_left() -> None:
    importances, tries = torch.tensor([1.0, 2.0, 5.0], dtype=torch.float64), 8000
    generator = random()
    pairs = torch.stack([draw_without_replacement(importances.log(), 2, generator) for _ in range(tries)])
    for first in range(3):
        for second in range(3):
            found = float(((pairs[:, 0] == first) & (pairs[:, 1] == second)).double().mean())
            left = float(importances.sum() - importances[first])
            chance = 0.0 if first == second else float(importances[first] * importances[second]) / (8 * left)
            assert abs(found - chance) <= 4 * math.sqrt(chance * (1 - chance) / tries)


def test_without_replacement_takes_all_there_are_whatever_their_importance() -> None:
    logs = torch.tensor([-math.inf, 0.0, -5000.0, -math.inf])
    found = draw_without_replacement(logs, 4, random()).tolist()
    assert found[:2] == [1, 2]
    assert sorted(found) == [0, 1, 2, 3]


def test_quantiles_are_scores_that_so_many_do_not_exceed() -> None:
    scores = torch.tensor([5.0, 1.0, 4.0, 2.0, 3.0])
    assert compute_quantiles(scores, [0, 20, 21, 50, 80, 81, 100]) == [1, 1, 2, 3, 4, 5, 5]
    assert compute_quantiles(scores[:1], [5, 95]) == [5, 5]


def test_rank_changes_are_places_and_equal_scores_stay_in_order() -> None:
    before = torch.tensor([3.0, 1.0, 2.0, 0.0])
    assert compute_rank_changes(before, before * 7).tolist() == [0, 0, 0, 0]
    assert compute_rank_changes(before, torch.tensor([0.0, 1.0, 2.0, 3.0])).tolist() == [3, 0, 0, 3]
    assert compute_rank_changes(torch.zeros(3), torch.ones(3)).tolist() == [0, 0, 0]


# --- draws without replacement in one go --------------------------------------------------------------------------


@given(scores=SCORES, count=st.integers(1, 40), smoothing=st.floats(0.01, 2))
def test_a_batch_includes_a_sample_in_proportion_until_it_is_certain(
    scores: Tensor, count: int, smoothing: float
) -> None:
    importances = smooth_scores(scores, smoothing)
    expected = compute_inclusion(importances, count)
    assert float(expected.sum()) == pytest.approx(count)
    if count > len(scores):
        assert torch.allclose(expected, count * importances / importances.sum())
        return
    assert float(expected.max()) <= 1 + 1e-9
    below = expected < 1 - 1e-9
    assert torch.allclose(
        expected[below], (expected[below].sum() * importances / importances[below].sum())[below]
    )
    if bool(below.any()) and not bool(below.all()):
        assert float(importances[~below].min()) >= float(importances[below].max()) * (1 - 1e-9)


@given(scores=SCORES, count=st.integers(1, 40), seed=st.integers(0, 100))
def test_a_systematic_draw_rounds_each_expected_number_up_or_down(
    scores: Tensor, count: int, seed: int
) -> None:
    expected = compute_inclusion(smooth_scores(scores, 0.02), count)
    rows = draw_systematic(expected, random(seed))
    assert len(rows) == count
    times = torch.bincount(rows, minlength=len(scores))
    assert bool((times >= (expected - 1e-9).floor()).all())
    assert bool((times <= (expected + 1e-9).ceil()).all())


def test_a_systematic_draw_includes_each_sample_as_often_as_it_should() -> None:
    expected, tries, source = (
        compute_inclusion(torch.tensor([0.1, 1, 2, 3, 4, 9.0]).double(), 3),
        4000,
        random(),
    )
    found = (
        torch.bincount(torch.cat([draw_systematic(expected, source) for _ in range(tries)]), minlength=6)
        / tries
    )
    assert bool(((found - expected).abs() <= 4 * (expected * (1 - expected) / tries).sqrt()).all())
    assert found[5] == 1


def test_no_period_in_the_data_meets_the_interval_of_the_draw() -> None:
    """Classes in turn, ten of them, and a batch that takes one sample in ten."""
    for seed in range(100):
        rows = draw_systematic(torch.full((200,), 0.1).double(), random(seed))
        assert len((rows % 10).unique()) > 2


@given(seed=st.integers(0, 1000))
def test_the_variance_ratio_of_drawn_samples_estimates_that_of_all(seed: int) -> None:
    scores = torch.randn(4000, generator=random(seed)).double().exp()
    expected = compute_inclusion(smooth_scores(scores.roll(1) + scores, 0.25), 800)
    rows = draw_systematic(expected, random(seed))
    weights = 0.2 / expected[rows]
    found = compute_variance_ratio(scores[rows], smooth_scores(scores[rows], 0.02, weights), weights)
    assert found == pytest.approx(compute_variance_ratio(scores, smooth_scores(scores, 0.02)), rel=0.25)


@pytest.mark.parametrize("count", [7, 8])
def test_eight_scores_are_enough_to_tell_how_ranks_have_moved(count: int) -> None:
    renewal, scores = ScoreRenewal(), torch.arange(float(count))
    renewal.add(scores, scores, torch.full((count,), 3), step=5)
    assert renewal.get_stats(5)["score_age"] == (None if count < 8 else 3.0)
