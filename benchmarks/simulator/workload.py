"""The small model of the largest simulations: an MLP 64-256-10, with samples of its own for every replica."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from farflung.data.datasets import TensorDataset
from farflung.types import Batch, Dataset, Json

__all__ = ["BATCH_SIZE", "MLP", "SAMPLES_EACH"]

BATCH_SIZE = 32
SAMPLES_EACH = 64


@dataclass
class MLP:
    """Random inputs of 64 numbers in 10 classes.

    Args:
      replicas: each has 64 samples.
    """

    replicas: int
    draws_from_torch_alone: ClassVar[bool] = True
    name: str = "benchmark/mlp"
    defaults: Mapping[str, Json] = field(
        default_factory=lambda: {
            "batch_size": BATCH_SIZE, "learning_rate": 0.1, "momentum": 0.9, "weight_decay": 0.0, "steps": 20,
        }
    )  # fmt: skip

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        count = self.replicas * SAMPLES_EACH
        inputs = torch.randn(count, 64, generator=generator)
        labels = torch.randint(0, 10, (count,), generator=generator)
        self._data = TensorDataset(inputs, labels, labels)

    def build_model(self, generator: torch.Generator) -> nn.Module:
        """The same initial weights for all."""
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.uniform_(-0.1, 0.1, generator=generator)
        return model

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Cross entropy."""
        return F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")

    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        """Accuracy."""
        hits: Tensor = (model(batch.inputs).argmax(dim=1) == batch.targets).float()
        return hits

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        """The same twice."""
        return self._data, self._data
