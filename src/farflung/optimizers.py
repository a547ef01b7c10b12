"""Torch optimizers of farflung, and the settings of all optimizers that a run selects by name."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT
from typing_extensions import override

from farflung.errors import ConfigError
from farflung.options import check_coefficient, check_flag, check_number
from farflung.types import OptimizerFactory

__all__ = [
    "OPTIMIZERS",
    "AdamSettings",
    "AdamWSettings",
    "Lars",
    "LarsSettings",
    "SGDSettings",
    "SignSGD",
    "SignSGDSettings",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SGDSettings:
    """Settings of torch's SGD.

    Args:
      nesterov: True for Nesterov momentum.

    Raises:
      ConfigError: An option is out of range, or, at creation, Nesterov momentum has no momentum.
    """

    nesterov: bool = False

    def __post_init__(self) -> None:
        check_flag("sgd", "nesterov", self.nesterov)

    def make(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        learning_rate: float,
        momentum: float,
        weight_decay: float,
    ) -> torch.optim.Optimizer:
        return torch.optim.SGD(
            parameters,
            lr=learning_rate,
            momentum=momentum,
            weight_decay=weight_decay,
            nesterov=self.nesterov,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamSettings:
    """Settings of torch's Adam, with weight decay in the gradient; the setting ``momentum`` is ignored.

    Args:
      betas: Decay factors of the running means of the gradient and of its square.
      eps: Term added to the root of the second mean.

    Raises:
      ConfigError: An option is out of range.

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
            check_coefficient(name, "betas", beta)
        check_number(name, "eps", self.eps, 0)

    def make(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        learning_rate: float,
        momentum: float,
        weight_decay: float,
    ) -> torch.optim.Optimizer:
        del momentum
        return self.kind(
            parameters, lr=learning_rate, betas=self.betas, eps=self.eps, weight_decay=weight_decay
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamWSettings(AdamSettings):
    """Settings of torch's AdamW, with weight decay decoupled from the gradient; ``momentum`` is ignored.

    Args:
      betas: Decay factors of the running means of the gradient and of its square.
      eps: Term added to the root of the second mean.

    References: Loshchilov & Hutter 2019, Alg. 2.
    """

    kind: ClassVar[type[torch.optim.Adam]] = torch.optim.AdamW


class _PerParameterOptimizer(torch.optim.Optimizer):
    """Base of optimizers that update each parameter with a gradient separately."""

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates all parameters with gradients, after calling the closure if one is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update_parameter(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def _update_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Updates a parameter in place by the settings of its group."""


class Lars(_PerParameterOptimizer):
    r"""SGD with layer-wise rates in proportion to the norm of a weight over that of its gradient.

    .. math::
        v \leftarrow \mu v + \eta \frac{c \|w\|}{\|g\| + \beta \|w\|} (g + \beta w), \qquad w \leftarrow w - v

    The factor limits steps of small weights with large batches and learning rates. Tensors with at most one dimension,
    such as biases and norm scales, and zero weights or gradients use plain SGD without decay or factor.

    Args:
      params: Parameters or parameter groups.
      lr: Learning rate :math:`\eta`.
      momentum: Momentum :math:`\mu`.
      weight_decay: Weight decay :math:`\beta`.
      trust: Trust coefficient c, above 0. With the usual 0.001, learning rates are about a hundred times those of SGD.

    Raises:
      ConfigError: An option is out of range.

    References: You, Gitman & Ginsburg 2017, Algorithm 1. Excluding tensors of one dimension is common practice.
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
        check_number("lars", "lr", lr, 0)
        check_coefficient("lars", "momentum", momentum)
        check_number("lars", "weight_decay", weight_decay, 0)
        LarsSettings(trust=trust)
        super().__init__(
            params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "trust": trust}
        )

    @override
    def _update_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
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
    """Settings that only :class:`Lars` has.

    Args:
      trust: Trust coefficient of :class:`Lars`.

    Raises:
      ConfigError: An option is out of range.
    """

    trust: float = 0.001

    def __post_init__(self) -> None:
        check_number("lars", "trust", self.trust, 0)
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
        return Lars(parameters, learning_rate, momentum=momentum, weight_decay=weight_decay, trust=self.trust)


class SignSGD(_PerParameterOptimizer):
    r"""Sign gradient descent, :math:`w \leftarrow (1 - \eta \lambda)\, w - \eta \operatorname{sign}(g)`.

    Learning rates are similar to Adam's. It has no momentum, since codecs such as ``demo`` have their own.

    >>> optimizer = SignSGD(model.parameters(), lr=1e-3)  # doctest: +SKIP
    >>> handle = farflung.attach(model, optimizer, "demo")  # doctest: +SKIP

    Args:
      params: Parameters or parameter groups.
      lr: Learning rate :math:`\eta`.
      weight_decay: Weight decay :math:`\lambda`, decoupled from the gradient.

    Raises:
      ConfigError: An option is out of range.

    References: Bernstein et al. 2018; decoupled weight decay as in Peng et al. 2024 (DeMo).
    """

    def __init__(self, params: ParamsT, lr: float, *, weight_decay: float = 0.0) -> None:
        check_number("sign_sgd", "lr", lr, 0)
        check_number("sign_sgd", "weight_decay", weight_decay, 0)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @override
    def _update_parameter(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(gradient.sign(), alpha=-group["lr"])


@dataclass(frozen=True, slots=True, kw_only=True)
class SignSGDSettings:
    """Settings of :class:`SignSGD`, which ignores ``momentum`` and has no other options."""

    def make(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        learning_rate: float,
        momentum: float,
        weight_decay: float,
    ) -> torch.optim.Optimizer:
        del momentum
        return SignSGD(parameters, learning_rate, weight_decay=weight_decay)


OPTIMIZERS: dict[str, Callable[..., OptimizerFactory]] = {
    "adam": AdamSettings,
    "adamw": AdamWSettings,
    "lars": LarsSettings,
    "sgd": SGDSettings,
    "sign_sgd": SignSGDSettings,
}
"""Settings classes of optimizers, by name."""
