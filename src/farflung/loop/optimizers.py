"""Learning rate of a step, and optimizer state as a tree."""

from __future__ import annotations

import torch

from farflung.config import Training
from farflung.moments import get_optimizer_name
from farflung.rates import Constant
from farflung.spec import format_spec
from farflung.types import Json, RateSchedule, State

__all__ = [
    "describe_optimizer",
    "get_optimizer_state",
    "load_optimizer_state",
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
    """Sets the learning rate of a step, equal on all replicas.

    Args:
      optimizer: Optimizer of the replica.
      training: Settings with the initial rate and the length of the run.
      rates: Schedule from :meth:`farflung.config.Training.make_rate_schedule`.
      step: Number of completed steps.
      samples: Number of samples that all replicas have drawn in these steps.
      size: Number of replicas.
      scale: Factor of :meth:`farflung.types.RateScaling.compute_factor` for the step; ``None``: no step is scaled.

    Returns:
      The rate; ``None`` if it never changes and the optimizer is left unchanged.
    """
    if rates == Constant() and scale is None:
        return None
    if rates.unit == "steps":
        factor = rates.compute_factor(step, training.steps)
    else:
        factor = rates.compute_factor(samples, training.steps * training.batch_size * size)
    rate = training.learning_rate * factor * (1.0 if scale is None else scale)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def describe_optimizer(optimizer: torch.optim.Optimizer) -> dict[str, Json]:
    """Returns class and settings of an optimizer by name, with a list entry for each group, to compare ranks.

    Settings of the implementation (``fused`` and the like) are left out, since they may differ between machines.
    """
    groups = optimizer.param_groups
    names = sorted({name for group in groups for name in group} - {"params", *_IMPLEMENTATION_SETTINGS})
    settings: dict[str, Json] = {
        f"optimizer's {name}": [_convert_to_json(group.get(name)) for group in groups] for name in names
    }
    return {"optimizer": get_optimizer_name(optimizer), **settings}


_IMPLEMENTATION_SETTINGS = frozenset({"capturable", "differentiable", "foreach", "fused", "param_names"})


def _convert_to_json(value: object) -> Json:
    """Converts a setting to JSON; a tensor of one number becomes that number."""
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        value = value.item()
    if isinstance(value, tuple | list):
        return [_convert_to_json(entry) for entry in value]
    return value if value is None or isinstance(value, bool | int | float | str) else format_spec(value)


def get_optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    """Returns the optimizer's state of each parameter, by number, without the settings."""
    return {
        "kind": get_optimizer_name(optimizer),
        "state": {str(index): dict(entry) for index, entry in optimizer.state_dict()["state"].items()},
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Restores the state from :func:`get_optimizer_state`."""
    entries = {int(index): entry for index, entry in state.get("state", {}).items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
