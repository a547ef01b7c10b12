"""Layer-wise adaptive rates: each weight moves by a share of its own size."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from farflung.errors import ConfigError
from farflung.optimizers.each import EachParameter
from farflung.options import number_option, share_option

__all__ = ["Lars", "LarsSettings"]


class Lars(EachParameter):
    r"""Stochastic gradient descent whose rate is, for each weight, in proportion to its norm over that of its gradient.

    .. math::
        v \leftarrow \mu v + \eta \frac{c \|w\|}{\|g\| + \beta \|w\|} (g + \beta w), \qquad w \leftarrow w - v

    So a large batch with a large learning rate does not move small weights too far. Biases and the scales of norms,
    which have one dimension, and what is zero, move by plain gradient descent without decay or factor.

    Args:
      params: to be optimized, or groups of them.
      lr: :math:`\eta`.
      momentum: :math:`\mu`.
      weight_decay: :math:`\beta`.
      trust: c, above 0. With the usual 0.001 learning rates are some hundred times those of plain SGD.

    Raises:
      ConfigError: an option out of its range.

    References: You, Gitman & Ginsburg 2017, Algorithm 1. That tensors of one dimension are left out is common use.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        trust: float = 0.001,
    ) -> None:
        number_option("lars", "lr", lr, 0)
        share_option("lars", "momentum", momentum)
        number_option("lars", "weight_decay", weight_decay, 0)
        LarsSettings(trust=trust)
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        )

    @override
    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        rate, decay = group["lr"], group["weight_decay"]
        change = gradient
        if parameter.dim() > 1:
            size, slope = float(parameter.norm()), float(gradient.norm())
            if size and slope:
                rate *= group["trust"] * size / (slope + decay * size)
                change = gradient.add(parameter, alpha=decay)
        if group["momentum"]:
            state = self.state[parameter]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(parameter)
            change = state["momentum_buffer"].mul_(group["momentum"]).add_(change, alpha=rate)
            rate = 1.0
        parameter.add_(change, alpha=-rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class LarsSettings:
    """The settings of :class:`Lars` that only it has.

    Args:
      trust: see there.

    Raises:
      ConfigError: an option out of its range.
    """

    trust: float = 0.001

    def __post_init__(self) -> None:
        number_option("lars", "trust", self.trust, 0)
        if not self.trust:
            raise ConfigError("lars: trust must be above 0")

    def make(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        learning_rate: float,
        momentum: float,
        weight_decay: float,
    ) -> torch.optim.Optimizer:
        """A fresh optimizer."""
        return Lars(parameters, learning_rate, momentum=momentum, weight_decay=weight_decay, trust=self.trust)
