"""Parameter states of torch's optimizers: momentum and moments."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from farflung.errors import ConfigError

__all__ = [
    "check_averageable",
    "collect_eval_state",
    "collect_moments",
    "drop_state",
    "get_learning_rate",
    "get_momentum",
    "get_optimizer_name",
    "is_predictable",
    "is_separable",
]


def get_optimizer_name(optimizer: torch.optim.Optimizer) -> str:
    """Returns the name of an optimizer's class, which checkpoints store."""
    return type(optimizer).__name__


def get_learning_rate(optimizer: torch.optim.Optimizer) -> float | None:
    """Returns the learning rate of the first group; None if the optimizer has none, such as Adafactor."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def get_momentum(optimizer: torch.optim.Optimizer) -> float:
    """Returns the largest momentum of all groups: ``momentum``, or the first of ``betas``, or 0 without either."""
    groups = optimizer.param_groups
    return max(float(group.get("momentum", (group.get("betas") or (0.0,))[0])) for group in groups)


def check_averageable(optimizer: torch.optim.Optimizer, advice: str) -> None:
    """Checks that :func:`collect_moments` supports an optimizer.

    Args:
      optimizer: Optimizer whose moments are to be averaged.
      advice: What to do if they cannot be, for the error.

    Raises:
      ConfigError: The optimizer's state is unknown.
    """
    if not isinstance(optimizer, torch.optim.SGD | torch.optim.Adam | torch.optim.AdamW):
        raise ConfigError(
            f"the moments of {get_optimizer_name(optimizer)} cannot be averaged, only those of SGD, Adam and AdamW: "
            f"{advice}"
        )


def collect_moments(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Returns the moments of SGD, Adam or AdamW for parameters, in their shapes, for writing in place.

    For a parameter without any gradient so far, these are zeros outside the optimizer's state.
    """
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    tensors: list[Tensor] = []
    for p in parameters:
        state = optimizer.state.get(p, {})
        for name in _list_moment_names(groups.get(p, {})):
            value = state.get(name)
            tensors.append(torch.zeros_like(p) if value is None else value)
    return tensors


def collect_eval_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Returns the state that schedule-free optimizers use in ``eval()``, in the parameters' shapes.

    The tensors are for writing in place; the list is empty for an optimizer without ``eval()``.
    """
    if not callable(getattr(optimizer, "eval", None)):
        return []
    return [
        value
        for p in parameters
        for _, value in sorted(optimizer.state.get(p, {}).items())
        if isinstance(value, Tensor) and value.shape == p.shape
    ]


def _list_moment_names(group: dict[str, Any]) -> tuple[str, ...]:
    """Returns the names of a group's moments from its settings, which are equal on all ranks."""
    if "betas" in group:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
    return ("momentum_buffer",) if group.get("momentum") else ()


def drop_state(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Removes the optimizer's state of parameters, so that it starts afresh."""
    for p in parameters:
        optimizer.state.pop(p, None)


def is_separable(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True if a step is known to change each parameter by its own gradient and state alone."""
    is_known = type(optimizer).__module__.startswith(("torch.optim.", "farflung.optimizers"))
    return is_known and not isinstance(optimizer, torch.optim.LBFGS)


def is_predictable(optimizer: torch.optim.Optimizer) -> bool:
    """Returns True for SGD without Nesterov or dampening, whose steps can be predicted from gradients."""
    return isinstance(optimizer, torch.optim.SGD) and not any(
        group["nesterov"] or group["dampening"] for group in optimizer.param_groups
    )
