"""Steps of one size in the direction of each gradient's sign."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from farflung.optimizers.each import EachParameter
from farflung.options import number_option

__all__ = ["SignSGD", "SignSGDSettings"]


class SignSGD(EachParameter):
    r"""Gradient descent by signs, :math:`w \leftarrow (1 - \eta \lambda)\, w - \eta \operatorname{sign}(g)`.

    Its learning rates are of the size of Adam's. It has no momentum: what goes with it has its own, such as the codec
    ``demo``.

    >>> optimizer = SignSGD(model.parameters(), lr=1e-3)  # doctest: +SKIP
    >>> handle = farflung.attach(model, optimizer, "demo")  # doctest: +SKIP

    Args:
      params: to be optimized, or groups of them.
      lr: :math:`\eta`.
      weight_decay: :math:`\lambda`, decoupled from the gradient.

    Raises:
      ConfigError: an option out of its range.

    References: Bernstein et al. 2018; decoupled weight decay as in Peng et al. 2024 (DeMo).
    """

    def __init__(self, params: ParamsT, lr: float, *, weight_decay: float = 0.0) -> None:
        number_option("sign_sgd", "lr", lr, 0)
        number_option("sign_sgd", "weight_decay", weight_decay, 0)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @override
    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(gradient.sign(), alpha=-group["lr"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SignSGDSettings:
    """Makes :class:`SignSGD`, which leaves the setting ``momentum`` out and has no other of its own."""

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
        return SignSGD(parameters, learning_rate, weight_decay=weight_decay)
