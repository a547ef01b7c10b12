"""What replicas say beside their gradients: the sums mean what each of them said."""

from __future__ import annotations

import pytest
import torch

from farflung.replica.votes import Rider, Tally, Vote


def told(*replicas: list[Vote]) -> tuple[float, Tally]:
    """The weights of all replicas' steps together, and what the sum of their riders says."""
    rider = Rider()
    cast = [rider.cast(steps, rank, {}) for rank, steps in enumerate(replicas)]
    return sum(weight for weight, _ in cast), rider.read(torch.stack([said for _, said in cast]).sum(dim=0))


def test_a_loss_counts_by_the_weight_of_its_step() -> None:
    weight, tally = told([Vote(2.0, 0.5)], [Vote(8.0, 1.5)])
    assert (tally.loss, weight) == (2.0 * 0.5 + 8.0 * 1.5, 2.0)


def test_the_steps_of_one_exchange_are_averaged() -> None:
    weight, tally = told([Vote(2.0, 0.5), Vote(4.0, 1.0)], [Vote(8.0, 1.0), Vote(6.0, 0.25)])
    assert (tally.loss, weight) == ((1.0 + 4.0 + 8.0 + 1.5) / 2, (0.5 + 1.0 + 1.0 + 0.25) / 2)


def test_a_loss_that_is_not_finite_has_no_weight() -> None:
    weight, tally = told([Vote(2.0, 0.5)], [Vote(float("nan"), 1.5)])
    assert (tally.loss, weight, tally.nonfinite, tally.ranks) == (1.0, 0.5, 1, [1])


@pytest.mark.parametrize(("outs", "count"), [((True, True), 1), ((True, False), 0)])
def test_a_replica_is_out_where_all_of_its_steps_are(outs: tuple[bool, ...], count: int) -> None:
    _, tally = told([Vote(0.0, 0.0, out=out) for out in outs], [Vote(0.0, 1.0)])
    assert tally.out == count
