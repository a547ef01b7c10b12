"""Layer-wise adaptive rates: each weight moves by a share of its own size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import Tensor, nn

from farflung.errors import ConfigError
from farflung.options import number_option

__all__ = ["Lars"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lars:
    r"""Stochastic gradient descent whose rate is, for each weight, in proportion to its norm over that of its gradient.

    .. math::
        v \leftarrow \mu v + \eta \frac{c \|w\|}{\|g\| + \beta \|w\|} (g + \beta w), \qquad w \leftarrow w - v

    with :math:`\eta` the learning rate, :math:`\mu` the momentum and :math:`\beta` the weight decay of the run. So a
    large batch with a large learning rate does not move small weights too far. Biases and the scales of norms, which
    have one dimension, and what is zero, move by plain gradient descent without decay or factor.

    Args:
      trust: c, above 0. With the usual 0.001 learning rates are some hundred times those of plain SGD.

    Raises:
      ConfigError: an option out of its range.

    References: You, Gitman & Ginsburg 2017, Algorithm 1. That tensors of one dimension are left out is common use.
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
        return _Lars(parameters, learning_rate, momentum, weight_decay, self.trust)


class _Lars(torch.optim.Optimizer):
    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        learning_rate: float,
        momentum: float,
        weight_decay: float,
        trust: float,
    ) -> None:
        super().__init__(
            parameters,
            {"lr": learning_rate, "momentum": momentum, "weight_decay": weight_decay, "trust": trust},
        )

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

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
