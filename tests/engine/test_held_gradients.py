"""What buckets say of the gradients of the last pass: kept, zeroed in place, taken away or replaced."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from farflung.engine import GradientBuckets


def leave(model: nn.Sequential) -> None:
    del model


def zero(model: nn.Sequential) -> None:
    model.zero_grad(set_to_none=False)


def take_away(model: nn.Sequential) -> None:
    model.zero_grad(set_to_none=True)


def replace(model: nn.Sequential) -> None:
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = parameter.grad.clone()


def zero_all_but_the_first(model: nn.Sequential) -> None:
    zero(model)
    (first, *_) = model.parameters()
    assert first.grad is not None
    first.grad.fill_(2.0)


@pytest.mark.parametrize(
    ("change", "is_kept", "is_zeroed"),
    [
        (leave, True, False),
        (zero, False, True),
        (take_away, False, False),
        (replace, False, False),
        (zero_all_but_the_first, False, True),
    ],
)
def test_gradients_of_the_last_pass_are_kept_or_zeroed(
    change: Callable[[nn.Sequential], None], is_kept: bool, is_zeroed: bool
) -> None:
    """The one that arrives, of the first parameter here, tells nothing of them."""
    model = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2))
    buckets = GradientBuckets(model.named_parameters(), bucket_nbytes=64)
    buckets.run_backward(model(torch.ones(3, 4)).square().mean(), lambda index: None)
    change(model)
    arriving = next(model.parameters())
    assert buckets.has_kept_gradients(arriving) == is_kept
    assert buckets.has_zeroed_gradients(arriving) == is_zeroed
    assert buckets.has_zeroed_gradients() == (is_zeroed and change is zero)
