"""What a solver solves: the two products of a matrix, an objective, and the targets of its samples."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from farflung.coded.objectives import Objective
from farflung.errors import ConfigError
from farflung.tasks import Pending, done

__all__ = ["HeldProducts", "Problem", "Products"]


class Products(Protocol):
    """A matrix :math:`X` of samples by features, by its products; all in float64."""

    @property
    def samples(self) -> int:
        """Rows of :math:`X`, without padding."""
        ...

    @property
    def features(self) -> int:
        """Columns of :math:`X`."""
        ...

    def times(self, weights: Tensor) -> Awaitable[Tensor]:
        """Multiplies :math:`X W`, (features, outputs) to (samples, outputs)."""
        ...

    def transposed_times(self, residuals: Tensor) -> Awaitable[Tensor]:
        """Multiplies :math:`X^T R`, (samples, outputs) to (features, outputs)."""
        ...


class HeldProducts:
    """The products of a matrix in memory: the reference for those of devices.

    Args:
      matrix: (samples, features), float64.

    Raises:
      ConfigError: of another shape.
    """

    def __init__(self, matrix: Tensor) -> None:
        if matrix.dim() != 2:
            raise ConfigError(f"products: expected a matrix, found {matrix.dim()} dimensions")
        self._matrix = matrix
        self.samples, self.features = matrix.shape

    def times(self, weights: Tensor) -> Pending[Tensor]:
        return done(self._matrix @ weights)

    def transposed_times(self, residuals: Tensor) -> Pending[Tensor]:
        return done(self._matrix.T @ residuals)


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Minimise an objective over the weights; intercept and targets stay on the coordinator.

    Weights have shape (rows, outputs): one row for each feature and, where there is an intercept, a last one for it.

    Args:
      products: of the samples' features.
      objective: the loss and its weight.
      targets: one entry for each sample, as the objective takes them.
    """

    products: Products
    objective: Objective
    targets: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        rows = self.products.features + int(self.objective.fit_intercept)
        return rows, self.objective.outputs(self.targets)

    def split(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Splits weights into those of the features (features, outputs), and the intercepts (outputs,)."""
        features = self.products.features
        return weights[:features], self.objective.intercept_scaling * weights[features:].sum(dim=0)

    async def margins(self, weights: Tensor) -> Tensor:
        """Computes the margins of all samples, (samples, outputs): one product."""
        features, intercepts = self.split(weights)
        return (await self.products.times(features)) + intercepts

    async def start(self, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Gives weights to start from and their margins: one product, or none for the default of zeros."""
        if weights is None:
            zeros = torch.zeros(self.shape, dtype=torch.float64)
            return zeros, zeros.new_zeros(self.products.samples, self.shape[1])
        return weights, await self.margins(weights)

    async def transposed(self, residuals: Tensor) -> Tensor:
        """Multiplies the transposed matrix, with the intercept's constant feature, by residuals: one product."""
        features = await self.products.transposed_times(residuals)
        if not self.objective.fit_intercept:
            return features
        constant = self.objective.intercept_scaling * residuals.sum(dim=0, keepdim=True)
        return torch.cat([features, constant])

    def penalty(self, weights: Tensor) -> tuple[float, Tensor]:
        """Computes the penalty of weights, and its gradient."""
        gradient = weights.clone()
        gradient[self.products.features :] *= self.objective.intercept_penalty
        return 0.5 * float((weights * gradient).sum()), gradient
