"""Metadata of steps: the sums mean what each rank said."""

from __future__ import annotations

import pytest
import torch

from farflung.engine.metadata import MetadataLayout, ReducedMetadata, StepMetadata


def reduced(*ranks: list[StepMetadata]) -> tuple[float, ReducedMetadata]:
    """Returns the sum of the ranks' weights, and their reduced metadata."""
    layout = MetadataLayout()
    packed = [layout.pack(steps, rank, {}) for rank, steps in enumerate(ranks)]
    total = torch.stack([vector for _, vector in packed]).sum(dim=0)
    return sum(weight for weight, _ in packed), layout.unpack(total)


def test_a_loss_counts_by_the_weight_of_its_step() -> None:
    weight, metadata = reduced([StepMetadata(2.0, 0.5)], [StepMetadata(8.0, 1.5)])
    assert (metadata.loss, weight) == (2.0 * 0.5 + 8.0 * 1.5, 2.0)


def test_the_steps_of_one_exchange_are_averaged() -> None:
    first = [StepMetadata(2.0, 0.5), StepMetadata(4.0, 1.0)]
    weight, metadata = reduced(first, [StepMetadata(8.0, 1.0), StepMetadata(6.0, 0.25)])
    assert (metadata.loss, weight) == ((1.0 + 4.0 + 8.0 + 1.5) / 2, (0.5 + 1.0 + 1.0 + 0.25) / 2)


def test_a_loss_that_is_not_finite_has_no_weight() -> None:
    weight, metadata = reduced([StepMetadata(2.0, 0.5)], [StepMetadata(float("nan"), 1.5)])
    assert (metadata.loss, weight) == (1.0, 0.5)
    assert (metadata.num_nonfinite, metadata.nonfinite_ranks) == (1, [1])


@pytest.mark.parametrize(("exhausted", "count"), [((True, True), 1), ((True, False), 0)])
def test_a_rank_is_exhausted_if_all_of_its_steps_are(exhausted: tuple[bool, ...], count: int) -> None:
    first = [StepMetadata(0.0, 0.0, is_exhausted=each) for each in exhausted]
    _, metadata = reduced(first, [StepMetadata(0.0, 1.0)])
    assert metadata.num_exhausted == count
