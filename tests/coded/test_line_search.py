"""The line search: its two conditions, from wherever it begins."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from farflung.coded import HeldProducts, Logistic, Objective, Problem, SquaredHinge
from farflung.coded.solvers import Ray, strong_wolfe
from farflung.seeding import generator
from tests.coded.problems import run


def ray_of(objective: Objective, seed: int, *, uphill: bool = False) -> Ray:
    random = generator(seed)
    matrix = torch.randn(60, 4, generator=random, dtype=torch.float64)
    targets = torch.where(torch.rand(60, 1, generator=random) < 0.5, 1.0, -1.0).to(torch.float64)
    problem = Problem(HeldProducts(matrix), objective, targets)
    weights = torch.randn(problem.shape, generator=random, dtype=torch.float64)
    margins = run(problem.margins(weights))
    _, slopes = objective.loss(margins, targets)
    gradient = problem.penalty(weights)[1] + run(problem.transposed(slopes))
    direction = gradient if uphill else -gradient
    return Ray(problem, weights, margins, direction, run(problem.margins(direction)))


@given(
    objective=st.sampled_from([Logistic(), SquaredHinge(), Logistic(C=1e3)]),
    seed=st.integers(0, 1000),
    guess=st.floats(-7, 3).map(lambda power: 10**power),
)
def test_both_conditions_hold(objective: Objective, seed: int, guess: float) -> None:
    ray = ray_of(objective, seed)
    start = ray.at(0.0)
    found = strong_wolfe(ray, start, guess)
    assert found is not None
    assert found.objective <= start.objective + 1e-4 * found.length * start.slope + 1e-10
    assert abs(found.slope) <= 0.1 * abs(start.slope)
    assert found.objective == pytest.approx(ray.at(found.length).objective, rel=1e-12)


@given(seed=st.integers(0, 1000))
def test_slopes_are_derivatives(seed: int) -> None:
    ray = ray_of(Logistic(), seed)
    step = 1e-6
    below, above = (ray.at(0.01 + sign * step).objective for sign in (-1, 1))
    assert ray.at(0.01).slope == pytest.approx((above - below) / (2 * step), rel=1e-3, abs=1e-4)


def test_uphill_nothing_is_found() -> None:
    ray = ray_of(Logistic(), 0, uphill=True)
    assert strong_wolfe(ray, ray.at(0.0), 1.0) is None
