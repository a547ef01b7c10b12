"""What a replica does with its optimizer besides stepping: the learning rate of a step, and its state as a tree."""

from __future__ import annotations

import torch

from farflung.config import Training
from farflung.moments import kind_of
from farflung.rates import Constant
from farflung.spec import text_of
from farflung.types import Json, RateSchedule, State

__all__ = [
    "load_optimizer_state",
    "optimizer_settings",
    "optimizer_state",
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
