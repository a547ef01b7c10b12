"""State that torch's optimizers have for parameters: momentum and moments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from farflung.errors import ConfigError

__all__ = [
    "check_averaged",
    "eval_state",
    "forget",
    "is_predictable",
    "kind_of",
    "learning_rate_of",
    "moments",
    "momentum_of",
]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Returns the name of an optimizer's class, by which checkpoints call it."""
    return type(optimizer).__name__


def learning_rate_of(optimizer: torch.optim.Optimizer) -> float | None:
    """Returns the learning rate of the first group; None if the optimizer sets its rates by itself, as Adafactor."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """Returns the share of a step's movement that goes on in the next one, the largest of all groups.

    That is the setting ``momentum``, or the first of ``betas``; 0 without either.
    """
    groups = optimizer.param_groups
    return max(float(group.get("momentum", (group.get("betas") or (0.0,))[0])) for group in groups)


def check_averaged(optimizer: torch.optim.Optimizer) -> None:
    """Checks that :func:`moments` knows the state of an optimizer.

    Raises:
      ConfigError: it does not.
    """
    if not isinstance(optimizer, torch.optim.SGD | torch.optim.Adam | torch.optim.AdamW):
        raise ConfigError(
            f"optimizer_state='averaged': the state of {kind_of(optimizer)} is not known, only that of SGD, Adam and "
            "AdamW: use 'kept' or 'reset'"
        )


def moments(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Returns the moments that SGD, Adam or AdamW keeps of some parameters, in their shapes, to be overwritten.

    A parameter that has had no gradient yet has zeros, which are not stored in the optimizer.
    """
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    tensors: list[Tensor] = []
    for p in parameters:
        state = optimizer.state.get(p, {})
        for name in _moments_in(groups.get(p, {})):
            value = state.get(name)
            tensors.append(torch.zeros_like(p) if value is None else value)
    return tensors


def eval_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Returns the state from which schedule-free optimizers make other parameters in their ``eval()``.

    Returns:
      Tensors in the shapes of parameters, to be overwritten; none of an optimizer without such modes.
    """
    if not callable(getattr(optimizer, "eval", None)):
        return []
    return [
        value
        for p in parameters
        for _, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, Tensor) and value.shape == p.shape
    ]


def _moments_in(group: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names of moments by a group's settings, which are equal on all ranks."""
    if "betas" in group:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
    return ("momentum_buffer",) if group.get("momentum") else ()


def forget(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Removes an optimizer's state of some parameters: it begins anew with them."""
    for p in parameters:
        optimizer.state.pop(p, None)


def is_predictable(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True for plain SGD, with momentum and weight decay, whose steps can be predicted from gradients."""
    return isinstance(optimizer, torch.optim.SGD) and not any(
        group["nesterov"] or group["dampening"] for group in optimizer.param_groups
    )
