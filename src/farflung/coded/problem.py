"""What a solver solves: the products of a matrix, an objective, and what its samples should have."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.coded.objectives.interface import Objective
from farflung.coded.products import Products

__all__ = ["Problem"]


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """Minimise an objective over the weights; the intercept and the targets stay here.

    Weights have shape (rows, outputs): one row for each feature and, where there is an intercept, a last one for it.

    Args:
      products: of the samples' features, wherever they are.
      objective: the loss and how much it counts.
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
        """The weights of the features (features, outputs), and the intercepts (outputs,)."""
        features = self.products.features
        return weights[:features], self.objective.intercept_scaling * weights[features:].sum(dim=0)

    async def margins(self, weights: Tensor) -> Tensor:
        """What the weights make of each sample, (samples, outputs): one product."""
        features, intercepts = self.split(weights)
        return (await self.products.times(features)) + intercepts

    async def start(self, weights: Tensor | None) -> tuple[Tensor, Tensor]:
        """Weights to start from and their margins: one product, or where none are given zeros, without any."""
        if weights is None:
            zeros = torch.zeros(self.shape, dtype=torch.float64)
            return zeros, zeros.new_zeros(self.products.samples, self.shape[1])
        return weights, await self.margins(weights)

    async def transposed(self, residuals: Tensor) -> Tensor:
        """The transposed matrix, the intercept's constant feature included, times residuals: one product."""
        features = await self.products.transposed_times(residuals)
        if not self.objective.fit_intercept:
            return features
        constant = self.objective.intercept_scaling * residuals.sum(dim=0, keepdim=True)
        return torch.cat([features, constant])

    def penalty(self, weights: Tensor) -> tuple[float, Tensor]:
        """The part of the objective that depends on the weights alone, and its gradient."""
        gradient = weights.clone()
        gradient[self.products.features :] *= self.objective.intercept_penalty
        return 0.5 * float((weights * gradient).sum()), gradient
