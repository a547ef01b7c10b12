"""The quadratic has the optimum it says it has."""

from __future__ import annotations

import pytest
import torch

from farflung.errors import ConfigError
from farflung.workloads import Quadratic


def test_optimum_is_stationary_and_its_loss_known() -> None:
    task = Quadratic(dim=16, samples=100, spread=50.0)
    data, _ = task.load_datasets()
    model = task.build_model(torch.Generator().manual_seed(0))
    with torch.no_grad():
        next(model.parameters()).copy_(task.get_optimum())
    batch = data.take(torch.arange(100), train=True)
    loss = task.compute_losses(model, batch).mean()
    loss.backward()
    assert loss.item() == pytest.approx(task.compute_optimal_loss(), rel=1e-5)
    grad = next(model.parameters()).grad
    assert grad is not None
    assert float(grad.norm()) < 1e-5
    assert float(task.compute_metrics(model, batch).mean()) == 0.0


def test_gradient_descent_converges_at_the_known_rate() -> None:
    task = Quadratic(dim=8, samples=40, spread=10.0)
    data, _ = task.load_datasets()
    everything = data.take(torch.arange(40), train=True)
    model = task.build_model(torch.Generator().manual_seed(0))
    (w,) = model.parameters()
    start = (w - task.get_optimum()).detach()
    optimizer = torch.optim.SGD([w], lr=0.5)
    for _ in range(20):
        optimizer.zero_grad()
        task.compute_losses(model, everything).mean().backward()
        optimizer.step()
    wanted = start * (1 - 0.5 * task.compute_curvature()) ** 20
    torch.testing.assert_close((w - task.get_optimum()).detach(), wanted, rtol=1e-3, atol=1e-5)


def test_curvature_spans_the_spread() -> None:
    curvature = Quadratic(dim=5, spread=100.0).compute_curvature()
    torch.testing.assert_close(curvature[[0, 2, 4]], torch.tensor([1.0, 0.1, 0.01]))


@pytest.mark.parametrize("options", [{"dim": 0}, {"groups": 0}, {"samples": 3}, {"spread": 0.5}])
def test_impossible_options(options: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="synthetic/quadratic needs"):
        Quadratic(**options)
