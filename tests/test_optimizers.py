"""Optimizers: Lars and SignSGD."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import farflung
from farflung.config import Training
from farflung.errors import ConfigError
from farflung.optimizers import Lars, LarsSettings, SignSGD

RATE, MOMENTUM, DECAY, TRUST = 3.0, 0.9, 0.01, 0.02


def followed(begin: Tensor, gradients: list[Tensor], momentum: float) -> Tensor:
    """You et al. 2017, Algorithm 1."""
    weight, velocity = begin.double(), torch.zeros(begin.shape, dtype=torch.float64)
    for gradient in gradients:
        own = gradient.double()
        local = TRUST * weight.norm() / (own.norm() + DECAY * weight.norm())
        velocity = momentum * velocity + RATE * local * (own + DECAY * weight)
        weight = weight - velocity
    return weight


@pytest.mark.parametrize("momentum", [0.0, MOMENTUM])
def test_a_weight_moves_by_a_share_of_its_size(momentum: float) -> None:
    generator = torch.Generator().manual_seed(3)
    begin = torch.randn(4, 5, generator=generator)
    gradients = [100.0 * torch.randn(4, 5, generator=generator) for _ in range(4)]
    weight = nn.Parameter(begin.clone())
    optimizer = Lars([weight], RATE, momentum=momentum, weight_decay=DECAY, trust=TRUST)
    for gradient in gradients:
        weight.grad = gradient.clone()
        optimizer.step()
    assert torch.allclose(weight.double(), followed(begin, gradients, momentum), rtol=1e-5)


@pytest.mark.parametrize("begin", [torch.ones(3), torch.zeros(2, 3)])
def test_what_has_one_dimension_or_is_zero_moves_by_plain_descent(begin: Tensor) -> None:
    weight = nn.Parameter(begin.clone())
    optimizer = Lars([weight], 0.5, weight_decay=DECAY)
    weight.grad = torch.ones_like(begin)
    optimizer.step()
    assert torch.equal(weight.detach(), begin - 0.5)


def test_what_has_no_gradient_stays() -> None:
    weights = [nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))]
    optimizer = Lars(weights, 1.0, momentum=0.9)
    weights[0].grad = torch.ones(2, 2)
    assert optimizer.step(lambda: 7.0) == 7.0
    assert torch.equal(weights[1], torch.ones(2, 2))
    assert not torch.equal(weights[0], torch.ones(2, 2))


def test_a_resumed_run_ends_as_the_whole(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "optimizer": "lars(trust=0.01)",
        "momentum": 0.9,
        "learning_rate": 0.5,
        "batch_size": 4,
        "seed": 5,
    }
    whole = farflung.simulate("synthetic/quadratic", steps=8, **settings)
    farflung.simulate("synthetic/quadratic", steps=5, out=tmp_path / "run", **settings)
    again = farflung.simulate("synthetic/quadratic", resume=tmp_path / "run", steps=8)
    for name, tensor in whole.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name])


@pytest.mark.parametrize("trust", [0.0, -1.0])
def test_bad_options_of_lars_are_refused(trust: float) -> None:
    for make in (
        lambda: LarsSettings(trust=trust),
        lambda: Lars([nn.Parameter(torch.ones(1))], 0.1, trust=trust),
    ):
        with pytest.raises(ConfigError, match="lars: trust"):
            make()


# --- SignSGD ------------------------------------------------------------------------------------------------


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


def test_bad_options_of_sign_sgd_are_refused() -> None:
    with pytest.raises(ConfigError, match="sign_sgd: weight_decay"):
        SignSGD([torch.nn.Parameter(torch.ones(1))], lr=0.1, weight_decay=-1.0)
