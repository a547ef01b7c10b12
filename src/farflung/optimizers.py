"""Optimizers of farflung, which are torch optimizers, and the settings of each optimizer that a run knows by name."""

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
from farflung.options import flag_option, number_option, share_option
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
    """The settings of torch's stochastic gradient descent.

    Args:
      nesterov: whether momentum is Nesterov's.

    Raises:
      ConfigError: an option out of its range; or, when it is made, Nesterov's momentum without any.
    """

    nesterov: bool = False

    def __post_init__(self) -> None:
        flag_option("sgd", "nesterov", self.nesterov)

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


class _EachParameter(torch.optim.Optimizer):
    """Moves each parameter that has a gradient by itself."""

    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Makes a step; a closure computes the loss afresh before it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Changes a parameter in place, by the settings of its group."""


class Lars(_EachParameter):
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
        return Lars(parameters, learning_rate, momentum=momentum, weight_decay=weight_decay, trust=self.trust)


class SignSGD(_EachParameter):
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
