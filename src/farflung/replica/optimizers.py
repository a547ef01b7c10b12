"""What a replica does with its optimizer besides stepping: the learning rate of a step, and its state as a tree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from farflung.config import Training
from farflung.errors import ConfigError
from farflung.rates import Constant
from farflung.spec import text_of
from farflung.types import Json, RateSchedule, State

__all__ = [
    "check_averaged",
    "forget",
    "kind_of",
    "load_optimizer_state",
    "moments",
    "momentum_of",
    "optimizer_settings",
    "optimizer_state",
    "rate_of",
    "second_versions",
    "set_rate",
]


def set_rate(
    optimizer: torch.optim.Optimizer,
    training: Training,
    rates: RateSchedule,
    *,
    step: int,
    samples: int,
    size: int,
    scale: float | None = None,
) -> float | None:
    """Sets the learning rate of a step; equal on all replicas, because what it follows from is.

    Args:
      optimizer: of the replica.
      training: has the rate that is changed, and how much there is to do.
      rates: what :meth:`farflung.config.Training.make_rates` has made.
      step: how many steps have been done before.
      samples: how many samples all replicas together have drawn before.
      size: number of replicas.
      scale: what :meth:`farflung.types.RateScaling.factor` says of the step; ``None``: no step is scaled.

    Returns:
      The rate; ``None`` where it never changes and the optimizer is left alone.
    """
    if rates == Constant() and scale is None:
        return None
    if rates.by == "steps":
        factor = rates.factor(step, training.steps)
    else:
        factor = rates.factor(samples, training.steps * training.batch_size * size)
    rate = training.learning_rate * factor * (1.0 if scale is None else scale)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def rate_of(optimizer: torch.optim.Optimizer) -> float | None:
    """Returns the learning rate of the first group; None if the optimizer sets its rates by itself, as Adafactor."""
    rate = optimizer.param_groups[0].get("lr")
    return None if rate is None else float(rate)


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """What a checkpoint calls an optimizer: the name of its class."""
    return type(optimizer).__name__


def momentum_of(optimizer: torch.optim.Optimizer) -> float:
    """The share of a step's movement that goes on in the next one, the largest of all groups.

    That is the setting ``momentum``, or the first of ``betas``; 0 where there is neither.
    """
    groups = optimizer.param_groups
    return max(float(group.get("momentum", (group.get("betas") or (0.0,))[0])) for group in groups)


def check_averaged(optimizer: torch.optim.Optimizer) -> None:
    """Whether :func:`moments` knows what an optimizer gathers.

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
    found: list[Tensor] = []
    for p in parameters:
        gathered = optimizer.state.get(p, {})
        for name in _moments_in(groups.get(p, {})):
            value = gathered.get(name)
            found.append(torch.zeros_like(p) if value is None else value)
    return found


def second_versions(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
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
    """By the settings of a group, which are alike on all replicas."""
    if "betas" in group:
        return ("exp_avg", "exp_avg_sq", *(("max_exp_avg_sq",) if group["amsgrad"] else ()))
    return ("momentum_buffer",) if group.get("momentum") else ()


def forget(optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter]) -> None:
    """Takes away what an optimizer has gathered for some parameters: it begins anew with them."""
    for p in parameters:
        optimizer.state.pop(p, None)


def optimizer_settings(optimizer: torch.optim.Optimizer) -> dict[str, Json]:
    """The class and the settings of an optimizer by name, a list with one for each group, for comparing ranks.

    What says how it computes and not what (``fused`` and the like) is left out: it may differ between machines.
    """
    groups = optimizer.param_groups
    names = sorted({name for group in groups for name in group} - {"params", *_WAYS})
    told: dict[str, Json] = {
        f"optimizer's {name}": [_plain(group.get(name)) for group in groups] for name in names
    }
    return {"optimizer": kind_of(optimizer), **told}


_WAYS = frozenset({"capturable", "differentiable", "foreach", "fused", "param_names"})


def _plain(value: object) -> Json:
    """A setting as JSON; a number in a tensor is that number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value if value is None or isinstance(value, bool | int | float | str) else text_of(value)


def optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    """What it has gathered for each parameter, by number; its settings are those of the training."""
    return {
        "kind": kind_of(optimizer),
        "state": {str(index): dict(entry) for index, entry in optimizer.state_dict()["state"].items()},
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Continues from :func:`optimizer_state`."""
    entries = {int(index): entry for index, entry in state.get("state", {}).items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
