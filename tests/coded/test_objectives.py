"""The contract of objectives, over a table of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.coded import (
    Hinge,
    InMemoryProducts,
    Logistic,
    Multinomial,
    Problem,
    SquaredHinge,
)
from farflung.errors import ConfigError
from farflung.seeding import create_generator
from tests.coded.problems import run

TABLE: dict[str, Any] = {
    "hinge": Hinge(C=0.3),
    "logistic": Logistic(C=0.3),
    "multinomial": Multinomial(C=0.3, classes=3),
    "squared_hinge": SquaredHinge(C=0.3),
}


def drawn(name: str, samples: int, spread: float = 3.0) -> tuple[Tensor, Tensor]:
    """Margins and targets of three outputs."""
    random = create_generator(0, name, samples)
    margins = spread * torch.randn(samples, 3, generator=random, dtype=torch.float64)
    if name == "multinomial":
        return margins, torch.randint(3, (samples,), generator=random)
    return margins, torch.randint(2, (samples, 3), generator=random).mul(2).sub(1).to(torch.float64)


def from_its_definition(name: str, margins: Tensor, targets: Tensor) -> Tensor:
    if name == "multinomial":
        return torch.nn.functional.cross_entropy(margins, targets, reduction="sum")
    right = margins * targets
    if name == "logistic":
        return torch.logaddexp(torch.zeros_like(right), -right).sum()
    short = 1 - right
    if name == "squared_hinge":
        return (torch.relu(short) ** 2).sum()
    return torch.where(short.abs() < 0.005, (short + 0.005) ** 2 / 0.02, torch.relu(short)).sum()


@pytest.mark.parametrize(("samples", "spread"), [(1, 3.0), (50, 1e4), (10_000, 3.0)])
@pytest.mark.parametrize("name", TABLE)
def test_loss_and_derivative(name: str, samples: int, spread: float) -> None:
    margins, targets = drawn(name, samples, spread)
    before = margins.clone(), targets.clone()
    total, slopes = TABLE[name].compute_loss(margins, targets)
    assert torch.equal(margins, before[0])
    assert torch.equal(targets, before[1])
    assert TABLE[name].count_outputs(targets) == slopes.shape[1] == 3
    free = margins.requires_grad_()
    expected = 0.3 * from_its_definition(name, free, targets)
    (gradient,) = torch.autograd.grad(expected, free)
    assert total == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(slopes, gradient, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("name", TABLE)
def test_curvature_bounds_the_second_derivative(name: str) -> None:
    curvature = TABLE[name].curvature
    margins, targets = drawn(name, 500, spread=1.0)
    way = torch.randn(margins.shape, generator=create_generator(1), dtype=torch.float64)
    slopes, further = (TABLE[name].compute_loss(at, targets)[1] for at in (margins, margins + 1e-4 * way))
    bends = ((further - slopes) * way).sum(dim=1) / 1e-4
    assert bool((bends <= 0.3 * curvature * (way * way).sum(dim=1) * (1 + 1e-6)).all())


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_gradient_of_the_whole_objective(name: str, fit_intercept: bool) -> None:
    options: dict[str, Any] = {"classes": 3} if name == "multinomial" else {}
    if name.endswith("hinge"):
        options["intercept_scaling"] = 2.5
    objective = replace(TABLE[name], fit_intercept=fit_intercept, **options)
    _, targets = drawn(name, 40)
    matrix = torch.randn(40, 5, generator=create_generator(2), dtype=torch.float64)
    problem = Problem(InMemoryProducts(matrix), objective, targets)
    assert problem.shape == (5 + fit_intercept, 3)
    weights = torch.randn(problem.shape, generator=create_generator(3), dtype=torch.float64).requires_grad_()
    features, intercepts = problem.split(weights)
    if fit_intercept:
        torch.testing.assert_close(intercepts, weights[5] * options.get("intercept_scaling", 1.0))
    penalised = weights if name.endswith("hinge") else features
    loss = from_its_definition(name, matrix @ features + intercepts, targets)
    whole = 0.5 * (penalised**2).sum() + 0.3 * loss
    (gradient,) = torch.autograd.grad(whole, weights)
    found = weights.detach()
    lost, slopes = objective.compute_loss(run(problem.compute_margins(found)), targets)
    penalty, shrinking = problem.compute_penalty(found)
    assert lost + penalty == pytest.approx(float(whole.detach()), rel=1e-12)
    torch.testing.assert_close(run(problem.multiply_transposed(slopes)) + shrinking, gradient)


@pytest.mark.parametrize("name", TABLE)
def test_weights_of_samples_repeat_them(name: str) -> None:
    margins, targets = drawn(name, 30)
    counts = torch.arange(30) % 4
    factors = counts.to(torch.float64)[:, None]
    loss, slopes = TABLE[name].compute_loss(margins, targets, factors)
    due, apart = TABLE[name].compute_loss(
        margins.repeat_interleave(counts, dim=0), targets.repeat_interleave(counts, dim=0)
    )
    assert loss == pytest.approx(due, rel=1e-12)
    sums = torch.zeros_like(slopes).index_add_(0, torch.arange(30).repeat_interleave(counts), apart)
    torch.testing.assert_close(slopes, sums)
    if name != "multinomial":
        spread = factors.expand_as(margins).contiguous()
        assert TABLE[name].compute_loss(margins, targets, spread)[0] == pytest.approx(loss, rel=1e-12)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", TABLE)
def test_the_curvature_of_a_shift_is_its_second_derivative(name: str, weighted: bool) -> None:
    """Along shifts that change the losses."""
    margins, targets = drawn(name, 200, spread=0.3)
    factors = torch.arange(200, dtype=torch.float64)[:, None] % 3 if weighted else None
    slopes = TABLE[name].compute_loss(margins, targets, factors)[1]
    curvature = TABLE[name].compute_shift_curvature(margins, slopes, targets, factors)
    shift = torch.tensor([1.0, -2.0, 1.0], dtype=torch.float64)
    ahead, behind = (
        TABLE[name].compute_loss(margins + length * shift, targets, factors)[1].sum(dim=0)
        for length in (1e-7, -1e-7)
    )
    torch.testing.assert_close(curvature @ shift, (ahead - behind) / 2e-7, rtol=1e-5, atol=1e-5)


def test_no_penalty() -> None:
    margins, targets = drawn("logistic", 20)
    free, one = Logistic(C=float("inf")), Logistic(C=1.0)
    assert free.compute_loss(margins, targets)[0] == one.compute_loss(margins, targets)[0]
    problem = Problem(InMemoryProducts(torch.ones(20, 2, dtype=torch.float64)), free, targets)
    penalty, gradient = problem.compute_penalty(torch.ones(3, 3, dtype=torch.float64))
    assert (penalty, float(gradient.abs().max())) == (0.0, 0.0)


def test_the_hinge_has_a_parabola_in_place_of_its_kink() -> None:
    right = torch.linspace(0.98, 1.02, 401, dtype=torch.float64).reshape(-1, 1, 1)
    losses = [Hinge().compute_loss(one, torch.ones_like(one))[0] for one in right]
    above = torch.tensor(losses, dtype=torch.float64) - torch.relu(1 - right.reshape(-1))
    assert float(above.min()) >= -1e-15
    assert float(above.max()) == pytest.approx(0.01 / 8)
    assert not above[(right.reshape(-1) - 1).abs() > 0.00501].abs().gt(1e-15).any()


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (Logistic, {"C": 0}, "C 0 must be a number above 0"),
        (Hinge, {"C": float("nan")}, "C nan must be"),
        (SquaredHinge, {"intercept_scaling": -1.0}, "intercept_scaling -1.0 must be"),
        (Multinomial, {"classes": 1}, "classes 1 must be at least 2"),
        (Multinomial, {"classes": 3, "C": "1"}, "C '1' must be"),
        (Hinge, {"fit_intercept": 1}, "fit_intercept 1 must be True or False"),
    ],
)
def test_settings_out_of_range(kind: type[Any], options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)


def test_products_are_of_a_matrix() -> None:
    with pytest.raises(ConfigError, match="expected a matrix, found 1 dimensions"):
        InMemoryProducts(torch.zeros(3))
