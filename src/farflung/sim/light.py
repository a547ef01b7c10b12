"""Workload without a model's arithmetic: it trains the same parameters, so that exchanges have the same sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from farflung.data import TensorDataset
from farflung.types import Batch, Dataset, Json

__all__ = ["LightWorkload"]

NUM_TRAIN, NUM_TEST = 4096, 16
"""Number of samples, which have no content."""


class LightWorkload:
    r"""Workload with another one's parameters, and a loss that is linear in them.

    .. math:: L(w) = \langle w, c \rangle

    All gradients are the constants c, drawn once. Times and sizes are those of the other workload, since a modelled
    device computes by its profile, and payloads of most codecs do not depend on values.

    Args:
      name: Name of the workload whose times it has.
      build_model: Function that builds its model.
    """

    defaults: ClassVar[Mapping[str, Json]] = {"batch_size": 1, "learning_rate": 1e-6, "steps": 1000}

    def __init__(self, name: str, build_model: Callable[[torch.Generator], nn.Module]) -> None:
        self.name, self.build_model = f"light/{name.rpartition('/')[2]}", build_model
        self._constants: list[Tensor] = []
        self._datasets = _create_dataset(NUM_TRAIN), _create_dataset(NUM_TEST)

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if not self._constants:
            generator = torch.Generator().manual_seed(0)
            self._constants = [torch.randn(p.shape, generator=generator).to(p.dtype) for p in parameters]
        products = [(p * c).sum() for p, c in zip(parameters, self._constants, strict=True)]
        return torch.stack([product.float() for product in products]).sum().expand(len(batch))

    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        del model
        return torch.zeros(len(batch))

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        return self._datasets


def _create_dataset(size: int) -> Dataset:
    return TensorDataset(torch.zeros(size, 1), torch.zeros(size, dtype=torch.int64))
