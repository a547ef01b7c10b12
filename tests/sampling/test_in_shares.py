"""Shares of a batch: what other replicas would draw, and how it is weighed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from farflung.gradient_coding import GradientCode, gradient_code
from farflung.sampling import InShares, Uniform
from farflung.types import PoolView
from tests.helpers import same_bits, same_tree

SIZE, BATCH, POOL = 5, 3, 37


def code(size: int) -> GradientCode:
    return gradient_code("cyclic", size, 2, 1)


def sampler(of: Callable[[int], GradientCode] = code) -> InShares:
    return InShares(Uniform(4), of)


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_share_is_the_batch_of_the_replica_of_its_number(rank: int) -> None:
    shared = sampler()
    alone = [Uniform(4) for _ in range(SIZE)]
    for step in range(9):
        batches = [one.next(PoolView(step, other, SIZE, BATCH, POOL)).ids for other, one in enumerate(alone)]
        draw = shared.next(PoolView(step, rank, SIZE, BATCH, POOL))
        assert draw.shares == code(SIZE).shares[rank]
        assert same_bits(draw.ids, torch.cat([batches[share] for share in draw.shares]))
        assert draw.weight == 1.0


def test_a_mean_with_its_weights_is_the_coded_sum_of_the_shares_means() -> None:
    for rank in range(SIZE):
        draw = sampler().next(PoolView(0, rank, SIZE, BATCH, POOL))
        assert draw.weights is not None
        losses = torch.randn(3 * BATCH, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))
        means = losses.view(3, BATCH).mean(dim=1)
        found = (losses * draw.weights).mean()
        assert float(found) == pytest.approx(float(code(SIZE).coefficients(rank) @ means))


def test_it_continues_from_a_state() -> None:
    one, other = sampler(), sampler()
    one.next(PoolView(0, 1, SIZE, BATCH, POOL))
    other.load_state_dict(one.state_dict())
    assert same_tree(one.state_dict(), other.state_dict())
    view = PoolView(1, 1, SIZE, BATCH, POOL)
    assert same_bits(one.next(view).ids, other.next(view).ids)
