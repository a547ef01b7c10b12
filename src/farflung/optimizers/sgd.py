"""The settings of torch's stochastic gradient descent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from farflung.errors import ConfigError

__all__ = ["SGDSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SGDSettings:
    """The settings of torch's stochastic gradient descent.

    Args:
      nesterov: whether momentum is Nesterov's.

    Raises:
      ConfigError: an option out of its range; or, when it is made, Nesterov's momentum without any.
    """

    nesterov: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.nesterov, bool):
            raise ConfigError(f"sgd: nesterov {self.nesterov!r} must be True or False")

    def make(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        learning_rate: float,
        momentum: float,
        weight_decay: float,
    ) -> torch.optim.Optimizer:
        """A fresh optimizer."""
        return torch.optim.SGD(
            parameters,
            lr=learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=self.nesterov,
        )
