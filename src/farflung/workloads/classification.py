"""Classification workloads with cross-entropy and accuracy per sample, and helpers of all workloads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from farflung.types import Batch, Dataset, Json

__all__ = ["Classification", "build_mercury_settings", "build_model", "build_settings"]


@dataclass(slots=True)
class Classification:
    """Workload that assigns each sample to one of several classes.

    Args:
      name: ``family/model``.
      build_network: Builds the model; its output is one row of logits per sample.
      load_data: Loads the training and the test set.
      defaults: Settings that train it well.
    """

    name: str
    build_network: Callable[[], nn.Module]
    load_data: Callable[[], tuple[Dataset, Dataset]]
    defaults: Mapping[str, Json]
    draws_from_torch_alone: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self.load_data = functools.cache(self.load_data)  # the replicas of one process share the samples

    def build_model(self, generator: torch.Generator) -> nn.Module:
        """Builds a model whose initial weights depend on ``generator`` alone."""
        return build_model(self.build_network, generator)

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the cross-entropy of each sample."""
        return F.cross_entropy(model(batch.inputs), batch.targets, reduction="none")

    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns 1 for each sample assigned to its class, else 0."""
        logits: Tensor = model(batch.inputs)
        return (logits.argmax(dim=-1) == batch.targets).to(torch.float32)

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        return self.load_data()


def build_model(build_network: Callable[[], nn.Module], generator: torch.Generator) -> nn.Module:
    """Builds a network on the CPU, under a seed drawn from ``generator``; restores torch's global random state.

    PyTorch's layers initialise themselves from the global state, so no other thread may draw from it meanwhile.
    """
    seed = int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))
    saved_state = torch.get_rng_state()
    try:
        torch.default_generator.manual_seed(seed)
        with torch.device("cpu"):
            return build_network()
    finally:
        torch.set_rng_state(saved_state)


def build_settings(
    *,
    batch_size: int,
    learning_rate: float,
    momentum: float = 0.9,
    weight_decay: float = 0.0,
    steps: int,
    **extra: Json,
) -> dict[str, Json]:
    """Builds default settings: batch size and learning rate of one replica, SGD's options, and others."""
    return {
        "batch_size": batch_size,
        "learning_rate": learning_rate,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "steps": steps,
        **extra,
    }


def build_mercury_settings(batch_size: int) -> dict[str, Json]:
    """Builds default settings of the applications of Zeng et al. 2021 (Mercury) at full size.

    Adam at 0.001 for one replica, so 0.004 for the paper's four, annealed to 0 by a cosine as in the released code.
    20,000 steps are the rounds that Mercury takes on CIFAR-10 in the paper's figure 12. Nothing was tuned here.

    Args:
      batch_size: Batch size per replica.
    """
    return build_settings(
        batch_size=batch_size,
        learning_rate=1e-3,
        momentum=0.0,
        steps=20_000,
        optimizer="adam",
        learning_rate_schedule="cosine",
    )
