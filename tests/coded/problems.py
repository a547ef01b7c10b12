"""Small problems on real data, and products that count or err."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, TypeVar

import torch
from torch import Tensor

from farflung.coded import InMemoryProducts, Objective, Problem
from farflung.seeding import create_generator
from farflung.tasks import Pending, Task, create_completed

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """What a coroutine returns that waits for nothing."""
    return Task(coroutine, lambda resume: resume(), eager_start=True).result()


class Counted(InMemoryProducts):
    """Counts rounds, and the columns of each."""

    def __init__(self, matrix: Tensor) -> None:
        super().__init__(matrix)
        self.rounds: list[int] = []

    def multiply(self, weights: Tensor) -> Pending[Tensor]:
        self.rounds.append(weights.shape[1])
        return super().multiply(weights)

    def multiply_transposed(self, residuals: Tensor) -> Pending[Tensor]:
        self.rounds.append(residuals.shape[1])
        return super().multiply_transposed(residuals)


class Noisy(InMemoryProducts):
    """Errs as decoding does: in proportion to the largest entry."""

    def __init__(self, matrix: Tensor, error: float) -> None:
        super().__init__(matrix)
        self._error, self._random = error, create_generator(0, "noise")

    def multiply(self, weights: Tensor) -> Pending[Tensor]:
        return self._noisy(super().multiply(weights).result())

    def multiply_transposed(self, residuals: Tensor) -> Pending[Tensor]:
        return self._noisy(super().multiply_transposed(residuals).result())

    def _noisy(self, answer: Tensor) -> Pending[Tensor]:
        noise = torch.randn(answer.shape, generator=self._random, dtype=answer.dtype)
        return create_completed(answer + self._error * answer.abs().max() * noise)


def cancer() -> tuple[Tensor, Tensor]:
    """569 samples of 30 standardised features, and their classes 0 and 1."""
    from sklearn.datasets import load_breast_cancer

    return _standardised(*load_breast_cancer(return_X_y=True))


def wine() -> tuple[Tensor, Tensor]:
    """178 samples of 13 standardised features, and their classes 0 to 2."""
    from sklearn.datasets import load_wine

    return _standardised(*load_wine(return_X_y=True))


def _standardised(rows: Any, classes: Any) -> tuple[Tensor, Tensor]:
    matrix = torch.from_numpy(rows)
    return (matrix - matrix.mean(dim=0)) / matrix.std(dim=0), torch.from_numpy(classes).to(torch.int64)


def signs(classes: Tensor) -> Tensor:
    """Targets of one output for two classes, of one for each of more."""
    wanted = torch.arange(int(classes.max()) + 1) if int(classes.max()) > 1 else torch.tensor([1])
    return torch.where(classes[:, None] == wanted, 1.0, -1.0).to(torch.float64)


def value(objective: Objective, matrix: Tensor, targets: Tensor, weights: Tensor) -> float:
    """The objective at these weights, from its definition and with no solver near."""
    problem = Problem(InMemoryProducts(matrix), objective, targets)
    loss, _ = objective.compute_loss(run(problem.compute_margins(weights)), targets)
    penalised = weights[: matrix.shape[1] if objective.intercept_penalty == 0 else None]
    return loss + 0.5 * float((penalised**2).sum())
