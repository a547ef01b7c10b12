"""Candidates and batches by the rules ``pool`` and ``two``: unbiased at both stages, whatever the scores are."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from farflung.sampling import DrawRule
from farflung.sampling.importance import compute_inclusion, smooth_scores
from farflung.sampling.rules import UNSCORED
from tests.covering import thorough

N, M, B, TRIES = 120, 30, 6, 1000

NOW = torch.randn(N, generator=torch.Generator().manual_seed(0)).exp()
VALUES = NOW.double() * 2 + torch.linspace(0, 3, N, dtype=torch.float64)
"""What the mean over is taken; it grows with scores, so draws that are not weighed in full miss it by far."""
KNOWN = torch.arange(N) % 3 > 0
CACHES = {
    "fresh": NOW,
    "none": torch.full((N,), UNSCORED),
    "of long ago": NOW.flip(0),
    "turned round": NOW.max() - NOW,
    "of some": torch.where(KNOWN, NOW**2, UNSCORED),
    "all zero": torch.zeros(N),
}


def off(means: list[Tensor]) -> float:
    """How many standard errors the mean of some is off that over all samples."""
    found = torch.stack(means)
    return abs(float(found.mean() - VALUES.mean())) / (float(found.std()) / math.sqrt(len(found)) + 1e-12)


@pytest.mark.parametrize(
    "cache", ["turned round", "of some", *thorough("fresh", "none", "of long ago", "all zero")]
)
def test_both_stages_expect_the_mean_over_all_samples(cache: str) -> None:
    rule = DrawRule("tried", 0.02, 4)
    first, second = [], []
    for at in range(TRIES):
        rows, weights = rule.choose_candidates(CACHES[cache], M, at, is_two_stage=True)
        assert len(rows.unique()) == M
        first.append((weights * VALUES[rows]).mean())
        drawn, weighed = rule.draw_batch(NOW[rows], weights, B, at)
        assert len(drawn.unique()) == B
        second.append((weighed * VALUES[rows[drawn]]).mean())
    assert off(first) < 4
    assert off(second) < 4


@pytest.mark.parametrize("size", [B // 2, B, M])
def test_a_batch_expects_the_mean_over_its_candidates(size: int) -> None:
    """Also of fewer than a batch takes."""
    rule, rows = DrawRule("tried", 0.02, 4), torch.arange(size)
    means = []
    for at in range(TRIES):
        drawn, weights = rule.draw_batch(NOW[rows], torch.ones(size).double(), B, at)
        assert len(drawn) == B
        means.append((weights * VALUES[drawn]).mean() - VALUES[rows].mean() + VALUES.mean())
    assert off(means) < 4


def test_candidates_of_the_pool_are_all_samples_in_turn() -> None:
    rule = DrawRule("tried", 0.02, 4)
    taken = [rule.choose_candidates(NOW, M, at, is_two_stage=False)[0] for at in range(8)]
    for turn in (taken[:4], taken[4:], taken[2:6]):
        assert sorted(torch.cat(turn).tolist()) == list(range(N))
    assert rule.state_dict() == {"cursor": 0}
    assert sorted(taken[0].tolist()) != taken[0].tolist()


def test_what_a_stream_does_not_draw_is_left_the_rest_of_its_share() -> None:
    rule, shares = DrawRule("tried", 0.02, 4), torch.linspace(0.2, 1.5, N, dtype=torch.float64)
    left = torch.tensor([1.0, 2.0, 5.0, math.inf], dtype=torch.float64).repeat(N // 4)
    _, _, rest = rule.draw_stream_batch(NOW, shares, left, B, 0)
    drawn = compute_inclusion(smooth_scores(NOW.double(), 0.02), B)
    ever = 1 - (1 - drawn) ** left
    torch.testing.assert_close(drawn * shares / ever + (1 - drawn) * rest, shares)
    assert float(rest[left == 1].max()) < 1e-12
    torch.testing.assert_close(rest[left == math.inf], shares[left == math.inf])


def test_weights_have_their_bounds() -> None:
    rule = DrawRule("tried", 0.02, 4)
    for cache in CACHES.values():
        for at in range(20):
            rows, weights = rule.choose_candidates(cache, M, at, is_two_stage=True)
            assert float(weights.max()) <= 5 * (1 + 1e-9)
            for scores in (NOW[rows], NOW[rows] ** 8, torch.zeros(M)):
                _, weighed = rule.draw_batch(scores, weights, B, at)
                assert float(weighed.max()) <= (1 + 0.02 * float(weights.mean())) / 0.02 * (1 + 1e-6)
                assert float(weighed.min()) > 0
