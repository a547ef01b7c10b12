"""Models and optimizers that a loop may not bring along are refused by name; wrappers are seen through."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from torch import nn

import farflung
from farflung.attach_checks import (
    check_optimizer,
    check_steps,
    check_unwrapped,
    needs_closure,
    unwrap_optimizer,
)
from farflung.errors import CheckpointError, ConfigError, Unsupported
from farflung.schedules import Delayed, Synchronous


class FullyShardedDataParallel(nn.Module):
    """Known by its name."""


class DTensor(nn.Parameter):
    """Likewise."""


class Wrapper(torch.optim.Optimizer):
    """As Accelerate's: an optimizer in name, without what one has."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


@pytest.mark.parametrize("has_site", [False, True])
@pytest.mark.parametrize("model", [FullyShardedDataParallel(), nn.Sequential(FullyShardedDataParallel())])
def test_a_model_under_fsdp1_is_refused(model: nn.Module, has_site: bool) -> None:
    with pytest.raises(
        Unsupported, match=r"use torch\.distributed\.fsdp\.fully_shard and attach\(site=\.\.\.\)"
    ):
        check_unwrapped(model, has_site=has_site)


def test_a_sharded_model_needs_a_site() -> None:
    model = nn.Module()
    model.weight = DTensor(torch.zeros(2))
    check_unwrapped(model, has_site=True)
    with pytest.raises(Unsupported, match=r"give attach\(site=\.\.\.\) the device mesh"):
        check_unwrapped(model)


def test_a_wrapped_optimizer_is_seen_through() -> None:
    inner = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    assert unwrap_optimizer(inner) is inner
    assert unwrap_optimizer(Wrapper(Wrapper(inner))) is inner
    around = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    around.base_optimizer = inner  # type: ignore[attr-defined]
    assert unwrap_optimizer(around) is inner
    other: Any = object()
    with pytest.raises(ConfigError, match=re.escape("object is no torch.optim.Optimizer")):
        unwrap_optimizer(other)


def test_an_optimizer_of_some_parameters_is_said_unless_the_others_are_frozen() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with pytest.warns(UserWarning, match=r"the optimizer lacks 1\.weight, 1\.bias, whose gradients"):
        check_optimizer(model, optimizer)
    model[1].requires_grad_(False)
    check_optimizer(model, optimizer)


@pytest.mark.parametrize("kind", ["none", "others"])
def test_an_optimizer_of_other_parameters_is_refused(kind: str) -> None:
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    held = [*other.parameters(), *(model.parameters() if kind == "others" else ())]
    with pytest.raises(
        ConfigError, match="none of the model" if kind == "none" else "2 parameters of the optimizer"
    ):
        check_optimizer(model, torch.optim.SGD(held, lr=0.1))


@pytest.mark.parametrize("kind", ["SGD", "AdamW", "LBFGS"])
def test_who_needs_a_closure(kind: str) -> None:
    optimizer = getattr(torch.optim, kind)(nn.Linear(2, 2).parameters(), lr=0.1)
    assert needs_closure(optimizer) == (kind == "LBFGS")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"elastic": -1}, "elastic -1 must be 0 to 1"),
        ({"elastic": 2}, "elastic 2 must be 0 to 1"),
        ({"deadline_s": 0.0}, "deadline_s 0.0: must be above 0"),
        ({"deadline_s": math.nan}, "deadline_s nan: must be above 0"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any], says: str) -> None:
    model = nn.Linear(2, 1)
    with pytest.raises(ConfigError, match=f"attach: {says}"):
        farflung.attach(model, torch.optim.SGD(model.parameters()), **options)


@pytest.mark.parametrize("weight", [-1.0, math.nan, math.inf])
def test_a_weight_without_sense_is_refused(weight: float) -> None:
    model = nn.Linear(2, 1)
    with (
        farflung.attach(model, torch.optim.SGD(model.parameters())) as handle,
        pytest.raises(ConfigError, match="must be finite, and 0 or more"),
    ):
        handle.set_weight(weight)


def test_steps_that_differ_between_replicas_or_average_with_nobody_are_said() -> None:
    parameters = [nn.Parameter(torch.zeros(2))]
    search = torch.optim.LBFGS(parameters, line_search_fn="strong_wolfe")
    with pytest.warns(UserWarning, match="the line search of LBFGS compares losses: return the mean"):
        check_steps(Synchronous(), search, 2)
    with pytest.warns(UserWarning, match="attach: schedule delayed averages replicas, and there is one"):
        check_steps(Delayed(), torch.optim.SGD(parameters), 1)
    check_steps(Synchronous(), search, 1)


@pytest.mark.parametrize("state", [{}, {"step": 1}, {"step": 1, "parameters": {"0": []}}])
def test_what_is_no_state_of_the_hook_is_refused(state: dict[str, Any]) -> None:
    hook_state, _ = farflung.ddp_hook("int8")
    with pytest.raises(CheckpointError, match="this is no state of the hook: it lacks"):
        hook_state.load_state_dict(state)
    hook_state.load_state_dict(hook_state.state_dict())
