"""torch's optimizers by name, and their state as a tree."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from farflung.config import Training
from farflung.types import State

__all__ = ["load_optimizer_state", "make_optimizer", "optimizer_state"]


def make_optimizer(training: Training, model: nn.Module) -> torch.optim.Optimizer:
    """SGD with momentum, or Adam, on the parameters that are trained."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if training.optimizer == "adam":
        return torch.optim.Adam(parameters, lr=training.learning_rate, weight_decay=training.weight_decay)
    return torch.optim.SGD(
        parameters,
        lr=training.learning_rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )


def optimizer_state(optimizer: torch.optim.Optimizer) -> State:
    """Its state dict with string keys; the indices of parameter groups are left to the model."""
    state = optimizer.state_dict()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in state["param_groups"]]
    return {
        "state": {str(index): dict(entry) for index, entry in state["state"].items()},
        "groups": {str(index): group for index, group in enumerate(groups)},
    }


def load_optimizer_state(optimizer: torch.optim.Optimizer, state: State) -> None:
    """Continues from :func:`optimizer_state`."""
    current = optimizer.state_dict()
    groups: list[dict[str, Any]] = [
        {**group, **state.get("groups", {}).get(str(index), {})}
        for index, group in enumerate(current["param_groups"])
    ]
    entries = {int(index): entry for index, entry in state.get("state", {}).items()}
    optimizer.load_state_dict({"state": entries, "param_groups": groups})
