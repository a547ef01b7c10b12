"""Quadratic with a known optimum: exact, fast, and of any condition number."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from farflung.data.datasets import TensorDataset
from farflung.errors import ConfigError
from farflung.seeding import create_generator as seeded
from farflung.types import Batch, Dataset, Json
from farflung.workloads.classification import build_model, build_settings

__all__ = ["Point", "Quadratic"]


class Point(nn.Module):
    """Model of parameters alone; its output is ``w - c`` for each row ``c``.

    Args:
      dim: Number of parameters.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(dim))

    @override
    def forward(self, centres: Tensor) -> Tensor:
        """Returns the distance vectors from ``draw_centres``, shape ``(n, dim)``."""
        return self.w - centres


@dataclass
class Quadratic:
    r"""Mean of paraboloids that share a curvature and differ in their centres.

    .. math:: f_i(w) = \tfrac12 (w - c_i)^\top A\,(w - c_i), \qquad w^* = \tfrac1n \sum_i c_i

    :math:`A` is diagonal with entries spaced evenly in their logarithm from ``1 / spread`` to 1, so gradient descent
    is stable below a learning rate of 2 and needs about ``spread`` steps. The centres lie in ``groups`` clusters; a
    sample's cluster is its label, so a split by label gives replicas with different optima. At the optimum the mean
    loss is :meth:`compute_optimal_loss`, not 0. Training and test set have equal samples. With the defaults one
    replica ends 0.18 from the optimum (seed 0): the noise of its batches.

    Args:
      dim: Number of parameters.
      samples: Number of centres.
      spread: Condition number of :math:`A`, at least 1.
      groups: Number of clusters of centres.
      seed: Seed of the centres.
    """

    dim: int = 64
    samples: int = 1024
    spread: float = 10.0
    groups: int = 10
    seed: int = 0
    draws_from_torch_alone: ClassVar[bool] = True
    name: str = field(default="synthetic/quadratic", init=False)
    defaults: Mapping[str, Json] = field(
        default_factory=lambda: build_settings(batch_size=32, learning_rate=0.1, momentum=0.0, steps=300),
        init=False,
    )

    def __post_init__(self) -> None:
        if self.dim < 1 or self.groups < 1 or self.samples < self.groups or not 1 <= self.spread < math.inf:
            raise ConfigError(
                "synthetic/quadratic needs dim >= 1, groups >= 1, samples >= groups and spread >= 1, not "
                f"dim={self.dim}, groups={self.groups}, samples={self.samples}, spread={self.spread}"
            )

    def build_model(self, generator: torch.Generator) -> nn.Module:
        """Builds a :class:`Point` of independent standard normal entries."""
        return build_model(lambda: Point(self.dim), generator)

    def compute_curvature(self) -> Tensor:
        """Computes the diagonal of :math:`A`, shape ``(dim,)``."""
        return torch.logspace(0.0, -float(torch.tensor(self.spread, dtype=torch.float64).log10()), self.dim)

    def draw_centres(self) -> tuple[Tensor, Tensor]:
        """Draws the centres, shape ``(samples, dim)``, and the cluster of each."""
        random = seeded(self.seed, "quadratic")
        cluster_centres = torch.randn(self.groups, self.dim, generator=random)
        labels = torch.arange(self.samples) % self.groups
        return cluster_centres[labels] + torch.randn(self.samples, self.dim, generator=random), labels

    def get_optimum(self) -> Tensor:
        """Returns the mean of the centres, shape ``(dim,)``."""
        return self._optimum

    @cached_property
    def _optimum(self) -> Tensor:
        return self.draw_centres()[0].to(torch.float64).mean(dim=0).to(torch.float32)

    def compute_optimal_loss(self) -> float:
        """Computes the mean loss at the optimum, the minimum."""
        centres = self.draw_centres()[0].to(torch.float64)
        offsets = centres - centres.mean(dim=0)
        return float(0.5 * (offsets.square() @ self.compute_curvature().to(torch.float64)).mean())

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Computes :math:`f_i(w)` of each sample."""
        offsets: Tensor = model(batch.inputs)
        return torch.mv(offsets.square(), self.compute_curvature().to(offsets)).mul(0.5)

    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns minus the distance to the optimum, equal for every sample; at best 0."""
        w: Tensor = model(torch.zeros_like(batch.inputs[:1]))[0]
        distance: Tensor = torch.linalg.vector_norm(w.detach() - self.get_optimum().to(w))
        return -distance.expand(len(batch))

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        """Returns one data set twice; nothing is random in its samples."""
        centres, labels = self.draw_centres()
        data = TensorDataset(centres, labels, labels, origin="synthetic/quadratic")
        return data, data
