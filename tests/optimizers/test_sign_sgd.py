"""Steps of one size, by signs."""

from __future__ import annotations

import pytest
import torch

import farflung
from farflung.config import Training
from farflung.errors import ConfigError
from farflung.optimizers import SignSGD


def test_each_number_moves_by_the_rate_against_the_sign_of_its_gradient() -> None:
    p = torch.nn.Parameter(torch.tensor([1.0, 2.0, -3.0, 4.0]))
    other = torch.nn.Parameter(torch.ones(2))
    settings = Training(1, 1, 0.1, momentum=0.9, weight_decay=0.5, optimizer="sign_sgd")
    optimizer = settings.make_optimizer([p, other])
    p.grad = torch.tensor([1e-9, -7.0, 3.0, 0.0])
    optimizer.step()
    expected = 0.95 * torch.tensor([1.0, 2.0, -3.0, 4.0]) - 0.1 * torch.tensor([1.0, -1.0, 1.0, 0.0])
    torch.testing.assert_close(p.detach(), expected)
    assert other.tolist() == [1.0, 1.0]


def test_a_loop_of_ones_own_trains_by_demo_with_it() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    optimizer = SignSGD(model.parameters(), lr=0.01)
    inputs, losses = torch.randn(16, 6), []
    with farflung.attach(model, optimizer, "demo"):
        for _ in range(20):
            optimizer.zero_grad()
            losses.append(model(inputs).square().mean())
            losses[-1].backward()
            optimizer.step()
    assert losses[-1] < 0.5 * losses[0]


def test_bad_options_are_refused() -> None:
    with pytest.raises(ConfigError, match="sign_sgd: weight_decay"):
        SignSGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=-1.0)
