"""Adaptive Top-k by the rule of the released code."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from farflung.reducers import AdaptiveTopK
from tests.reducers.replicas import PARTS, SPEC, Replica, assert_alike, gradient, run

KEPT = {part.start: max(1, part.numel // 10) for part in PARTS}
COVERED = sum(part.numel for part in PARTS)


def ways(replica: Replica) -> list[bool]:
    """Whether each exchange was compressed, by its bytes."""
    return [nbytes < SPEC.numel * 4 / 2 for nbytes in replica.nbytes]


def followed(steps: int, size: int, threshold: float, epoch: int | None = None) -> tuple[list[bool], Tensor]:
    """The released code's rules, one replica after the other: its decisions, and the sum of all that came out."""
    residuals = [torch.zeros(SPEC.numel) for _ in range(size)]
    means: list[list[float]] = [[] for _ in range(size)]
    decisions, came = [], torch.zeros(SPEC.numel)
    for step in range(steps):
        votes, dense, sparse = 0, torch.zeros(SPEC.numel), torch.zeros(SPEC.numel)
        for rank in range(size):
            own = gradient(rank, step)
            fed, sent, norms, largest = own + residuals[rank], torch.zeros(SPEC.numel), 0.0, 0.0
            for part in PARTS:
                place = slice(part.start, part.start + part.numel)
                top = fed[place].abs().topk(KEPT[part.start]).indices + part.start
                sent[top] = fed[top]
                norms += float(own[place].norm())
                largest += float(fed[top].norm())
            if epoch and step % epoch == 0:
                means[rank] = []
            means[rank].append(abs(norms - largest) / norms)
            votes += sum(means[rank]) / len(means[rank]) <= threshold
            residuals[rank] = fed - sent
            dense += own
            sparse += sent
        decisions.append(votes >= size // 2)
        came += (sparse if decisions[-1] else dense) / size
    return decisions, came


@pytest.mark.parametrize(("size", "epoch"), [(2, None), (3, 4)])
@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.26, 0.5])
def test_it_does_what_the_released_code_does(size: int, epoch: int | None, threshold: float) -> None:
    replicas = run(
        AdaptiveTopK(rule="released", threshold=threshold, epoch_steps=epoch), size, 10, weighted=False
    )
    assert_alike(replicas)
    decisions, came = followed(10, size, threshold, epoch)
    assert ways(replicas[0]) == decisions
    out = sum((one.mean for one in replicas[0].results), torch.zeros(SPEC.numel))
    assert torch.allclose(out, came, atol=1e-5)


def test_decisions_are_counted() -> None:
    (one, _) = run(AdaptiveTopK(rule="released", threshold=0.26), 2, 10, weighted=False)
    shared = one.slot.state.shared
    assert (shared["steps"], shared["compressed"]) == (10, sum(ways(one)))


def test_a_gradient_that_is_no_number_counts_as_left_out() -> None:
    def broken(rank: int, step: int) -> Tensor:
        return gradient(rank, step) * (float("nan") if step == 1 else 1.0)

    (one, _) = run(AdaptiveTopK(rule="released", threshold=0.6), 2, 6, make=broken)
    assert one.results[-1].mean.isfinite().all()
