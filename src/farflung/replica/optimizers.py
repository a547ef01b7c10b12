"""What a replica does with its optimizer besides stepping: the learning rate of a step, and its state as a tree."""

from __future__ import annotations

import torch

from farflung.config import Training
from farflung.rates import Constant
from farflung.types import RateSchedule, State

__all__ = ["load_optimizer_state", "optimizer_state", "set_rate"]


def set_rate(
    optimizer: torch.optim.Optimizer,
    training: Training,
    rates: RateSchedule,
    *,
    step: int,
    samples: int,
    size: int,
) -> float | None:
    """Sets the learning rate of a step; equal on all replicas, because what it follows from is.

    Args:
      optimizer: of the replica.
      training: has the rate that is changed, and how much there is to do.
      rates: what :meth:`farflung.config.Training.make_rates` has made.
      step: how many steps have been done before.
      samples: how many samples all replicas together have drawn before.
      size: number of replicas.

    Returns:
      The rate; ``None`` where it never changes and the optimizer is left alone.
    """
    if rates == Constant():
        return None
    if rates.by == "steps":
        factor = rates.factor(step, training.steps)
    else:
        factor = rates.factor(samples, training.steps * training.batch_size * size)
    rate = training.learning_rate * factor
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    """What it has gathered for each parameter, by number; its settings are those of the training."""
    return {"state": {str(index): dict(entry) for index, entry in optimizer.state_dict()["state"].items()}}


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Continues from :func:`optimizer_state`."""
    entries = {int(index): entry for index, entry in state.get("state", {}).items()}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": entries})
