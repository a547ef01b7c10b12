"""Steps of one size in the direction of each gradient's sign."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import overload

import torch
from torch import nn

__all__ = ["SignSGD"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SignSGD:
    r"""Gradient descent by signs, :math:`w \leftarrow (1 - \eta \lambda)\, w - \eta \operatorname{sign}(g)`.

    Its learning rates :math:`\eta` are of the size of Adam's. It has no momentum and leaves that setting out: what goes
    with it has its own, such as the codec ``demo``.

    References: Bernstein et al. 2018; decoupled weight decay :math:`\lambda` as in Peng et al. 2024 (DeMo).
    """

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
        return _SignSGD(parameters, learning_rate, weight_decay)


class _SignSGD(torch.optim.Optimizer):
    def __init__(self, parameters: Sequence[nn.Parameter], learning_rate: float, weight_decay: float) -> None:
        super().__init__(parameters, {"lr": learning_rate, "weight_decay": weight_decay})

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
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
                    parameter.add_(parameter.grad.sign(), alpha=-group["lr"])
        return loss
