"""The settings of torch's Adam and AdamW."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from farflung.errors import ConfigError
from farflung.options import number_option, share_option

__all__ = ["AdamSettings", "AdamWSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """The settings of torch's Adam, whose weight decay is part of the gradient; the setting ``momentum`` is left out.

    Args:
      betas: the shares of the running means, of the gradient and of its square, that are kept at each step.
      eps: added to the root of the second.

    Raises:
      ConfigError: an option out of its range.

    References: Kingma & Ba 2015, Alg. 1.
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    kind: ClassVar[type[torch.optim.Adam]] = torch.optim.Adam

    def __post_init__(self) -> None:
        name = self.kind.__name__.lower()
        betas: object = self.betas
        if not isinstance(betas, Sequence) or len(betas) != 2:
            raise ConfigError(f"{name}: betas {betas!r} must be two, as in betas=(0.9, 0.999)")
        for beta in betas:
            share_option(name, "betas", beta)
        number_option(name, "eps", self.eps, 0)

    def make(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        learning_rate: float,
        momentum: float,
        weight_decay: float,
    ) -> torch.optim.Optimizer:
        """A fresh optimizer."""
        del momentum
        return self.kind(
            parameters, lr=learning_rate, betas=self.betas, eps=self.eps, weight_decay=weight_decay
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings(AdamSettings):
    """The settings of torch's AdamW, whose weight decay is no part of the gradient and of its running means.

    Args:
      betas: the shares of the running means, of the gradient and of its square, that are kept at each step.
      eps: added to the root of the second.

    References: Loshchilov & Hutter 2019, Alg. 2.
    """

    kind: ClassVar[type[torch.optim.Adam]] = torch.optim.AdamW
