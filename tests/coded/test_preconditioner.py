"""The approximate Hessian against the whole one, and the columns' means and sizes that it is made of."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from farflung.coded import InMemoryProducts, Logistic, Objective, Problem, SquaredHinge
from farflung.coded.preconditioner import ColumnStats, Preconditioner
from farflung.errors import BadSamples
from farflung.seeding import create_generator
from tests.coded.problems import Counted, run

SAMPLES = 2000


def matrix_of(offset: float = 0.0) -> Tensor:
    """Columns that are independent, of sizes 1 to 4."""
    sizes = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
    return torch.randn(SAMPLES, 3, generator=create_generator(0), dtype=torch.float64) * sizes + offset


def problem_of(matrix: Tensor, objective: Objective, factors: Tensor | None = None) -> Problem:
    return Problem(
        InMemoryProducts(matrix), objective, torch.ones(len(matrix), 1, dtype=torch.float64), factors
    )


@pytest.mark.parametrize("weighted", [False, True])
def test_means_and_sizes_of_columns(weighted: bool) -> None:
    matrix = matrix_of(1e3)
    factors = torch.arange(SAMPLES, dtype=torch.float64)[:, None] % 3
    products = Counted(matrix)
    targets = torch.ones(SAMPLES, 1, dtype=torch.float64)
    problem = Problem(products, Logistic(), targets, factors if weighted else None)
    stats = run(ColumnStats.measure(problem))
    assert len(products.rounds) == 1
    weights = factors if weighted else torch.ones_like(factors)
    means = (weights * matrix).sum(dim=0) / weights.sum()
    torch.testing.assert_close(stats.means[:, 0], means)
    sizes = (weights * (matrix - means) ** 2).sum(dim=0).sqrt()
    assert bool(((stats.sizes[:, 0] / sizes).log().abs() < 1).all())
    assert stats.total == float(weights.sum())


@pytest.mark.parametrize(
    "objective",
    [
        SquaredHinge(C=0.1, intercept_scaling=3.0),
        SquaredHinge(C=0.1, fit_intercept=False),
        Logistic(C=0.1),
        Logistic(C=0.1, fit_intercept=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("offset", [0.0, 50.0])
def test_it_is_near_the_hessian_of_the_bound(objective: Objective, offset: float) -> None:
    """Of independent columns: its inverse times the Hessian has eigenvalues within the factor of the sizes' errors."""
    matrix = matrix_of(offset)
    problem = problem_of(matrix, objective)
    preconditioner = Preconditioner.from_problem(problem, run(ColumnStats.measure(problem)))
    ones = torch.full((SAMPLES, 1), objective.intercept_scaling, dtype=torch.float64)
    whole = torch.cat([matrix, ones], dim=1) if objective.fit_intercept else matrix
    penalty = torch.ones(whole.shape[1], dtype=torch.float64)
    if objective.fit_intercept:
        penalty[-1] = objective.intercept_penalty
    hessian = objective.C * objective.curvature * whole.T @ whole + torch.diag(penalty)
    eigenvalues = torch.linalg.eigvals(preconditioner.solve(hessian)).real
    assert (
        float(eigenvalues.max() / eigenvalues.min()) < 40
    )  # 16 of unlike columns, as those are within the spread


@pytest.mark.parametrize("objective", [SquaredHinge(), Logistic()], ids=str)
def test_its_inverse_is_symmetric_and_positive(objective: Objective) -> None:
    problem = problem_of(matrix_of(20.0), objective)
    preconditioner = Preconditioner.from_problem(problem, run(ColumnStats.measure(problem)))
    inverse = preconditioner.solve(torch.eye(4, dtype=torch.float64))
    torch.testing.assert_close(inverse, inverse.T)
    assert float(torch.linalg.eigvalsh(inverse).min()) > 0
    several = torch.randn(4, 2, generator=create_generator(1), dtype=torch.float64)
    torch.testing.assert_close(preconditioner.solve(several), inverse @ several)


def test_columns_of_very_unlike_sizes_are_scaled() -> None:
    sizes: Any = torch.tensor([1e-3, 1.0, 1e6], dtype=torch.float64)
    problem = problem_of(matrix_of() * sizes, Logistic(C=float("inf")))
    scales = Preconditioner.from_problem(problem, run(ColumnStats.measure(problem))).scales[:3, 0]
    curvatures = 0.25 * SAMPLES * (sizes * torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)) ** 2
    assert bool(((curvatures / scales).log().abs() < 8).all()), (
        "1000 in the curvature and the errors of sizes"
    )


def test_features_whose_squares_are_infinite() -> None:
    problem = problem_of(matrix_of() * 1e160, Logistic())
    with pytest.raises(BadSamples, match="the squares of the features are not finite"):
        Preconditioner.from_problem(problem, run(ColumnStats.measure(problem)))
