"""Workloads that predict the next character of a play."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from farflung.data import shakespeare
from farflung.errors import ConfigError
from farflung.types import Batch, Dataset, Json
from farflung.workloads.classification import build_model, build_settings
from farflung.workloads.models import NextSymbol, Transformer

__all__ = ["GPT", "LSTM"]


@dataclass
class _NextCharacter:
    """Workload that predicts each character of a window from those before it in the window.

    A sample is a window; its loss is the mean over its characters, its score the share predicted right.
    """

    draws_from_torch_alone: ClassVar[bool] = True
    stride: ClassVar[int | None] = None
    """Characters between the starts of two training windows; ``None``: the length of a window."""

    length: int = 64

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        """Loads windows of the first nine tenths of the text, and of the last."""
        return self._windows

    @cached_property
    def _windows(self) -> tuple[Dataset, Dataset]:
        return shakespeare.load(length=self.length, stride=self.stride)

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the mean cross-entropy over the characters of each window."""
        logits: Tensor = model(batch.inputs)
        return F.cross_entropy(logits.transpose(1, 2), batch.targets, reduction="none").mean(dim=1)

    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        """Returns the share of the characters of each window that are predicted right."""
        logits: Tensor = model(batch.inputs)
        return (logits.argmax(dim=-1) == batch.targets).to(torch.float32).mean(dim=1)


@dataclass
class LSTM(_NextCharacter):
    """Prediction of each character of a window from those before it, by a recurrent network.

    A sample is a window; its loss is the mean over its characters, its score the share predicted right.

    Share predicted right in the last tenth of the text with the defaults (1,000 steps of 32, seeds 0 and 1): 48.7 and
    48.8 %. The best guess from the one character before: 27.0 %.

    Args:
      length: Characters of a window.
      hidden: Width of the LSTM.
    """

    hidden: int = 128
    name: str = field(default="tinyshakespeare/lstm", init=False)
    defaults: Mapping[str, Json] = field(
        default_factory=lambda: build_settings(batch_size=32, learning_rate=1.0, momentum=0.9, steps=1000),
        init=False,
    )

    def __post_init__(self) -> None:
        if self.length < 1 or self.hidden < 1:
            raise ConfigError(
                f"tinyshakespeare/lstm needs length and hidden above 0, not {self.length} and {self.hidden}"
            )

    def build_model(self, generator: torch.Generator) -> nn.Module:
        """Builds a model whose initial weights depend on ``generator`` alone."""
        return build_model(lambda: NextSymbol(len(shakespeare.SYMBOLS), 32, self.hidden), generator)


@dataclass
class GPT(_NextCharacter):
    """Prediction of each character of a window from those before it, by a small transformer.

    A sample is a window, which begins at any character in training; its loss is the mean over its characters, its
    score the share predicted right. The test set is the whole last tenth of the text, in windows that do not overlap.

    The defaults are those of nanoGPT for a CPU, without dropout, with its batch of 12 as 3 on each of four replicas;
    it publishes a loss of 1.88 after 2,000 steps. Weight decay applies to all parameters here, also to norms.

    Args:
      length: Characters of a window.
      layers: Blocks of attention and dense layers.
      heads: Attention heads of each block; a divisor of ``width``.
      width: Width of each position.

    Raises:
      ConfigError: An option is out of range.

    Reference: Karpathy, nanoGPT, the settings of its README for a laptop.
    """

    stride: ClassVar[int | None] = 1
    symbols: ClassVar[int] = len(shakespeare.SYMBOLS)

    layers: int = 4
    heads: int = 4
    width: int = 128
    name: str = field(default="tinyshakespeare/gpt", init=False)
    defaults: Mapping[str, Json] = field(
        default_factory=lambda: build_settings(
            batch_size=3,
            learning_rate=1e-3,
            momentum=0.0,
            weight_decay=0.1,
            steps=2000,
            optimizer="adamw(betas=(0.9, 0.99))",
            learning_rate_schedule="cosine(final=0.1, warmup=100)",
            clip_norm=1.0,
        ),
        init=False,
    )

    def __post_init__(self) -> None:
        if min(self.length, self.layers, self.heads, self.width) < 1:
            raise ConfigError(
                f"{self.name} needs length, layers, heads and width above 0, not {self.length}, "
                f"{self.layers}, {self.heads} and {self.width}"
            )
        if self.width % self.heads:
            raise ConfigError(
                f"{self.name}: width {self.width} is no multiple of heads {self.heads}, which share it"
            )

    def build_model(self, generator: torch.Generator) -> nn.Module:
        """Builds a model whose initial weights depend on ``generator`` alone."""
        return build_model(self._build_network, generator)

    def _build_network(self) -> nn.Module:
        return Transformer(self.symbols, self.length, self.layers, self.heads, self.width)
