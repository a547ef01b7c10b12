"""Settings are checked where they are made, and the message names the option."""

from __future__ import annotations

import copy
import dataclasses
import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from farflung.config import Training
from farflung.errors import (
    BadLabels,
    ConfigError,
    DeadlinePassed,
    FarflungError,
    PeerLost,
    StorageError,
    UnknownName,
)
from farflung.optimizers import OPTIMIZERS
from farflung.types import Json

GOOD: dict[str, Any] = {"steps": 10, "batch_size": 4, "learning_rate": 0.1}


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("steps", bad) for bad in (0, -1)),
        *((name, -1) for name in ("seed", "evaluate_every", "checkpoint_every")),
        ("batch_size", 0),
        *(("learning_rate", bad) for bad in (0.0, -0.1, math.nan, math.inf)),
        *(("momentum", bad) for bad in (1.0, -0.1, math.nan)),
        *((name, bad) for name in ("weight_decay", "clip_norm") for bad in (-1e-9, math.nan, math.inf)),
        ("on_nonfinite", "ignore"),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(name: str, bad: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        Training(**{**GOOD, name: bad})
    assert f"--{name.replace('_', '-')} {bad}: must be" in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("name", "fine"),
    [
        *((name, 1) for name in ("steps", "batch_size")),
        *((name, 0) for name in ("seed", "evaluate_every", "checkpoint_every", "weight_decay", "clip_norm")),
        ("learning_rate", 1e-12),
        *(("momentum", fine) for fine in (0.0, 0.999)),
        *(("optimizer", name) for name in OPTIMIZERS),
    ],
)
def test_the_ends_of_each_range_are_fine(name: str, fine: Any) -> None:
    assert getattr(Training(**{**GOOD, name: fine}), name) == fine


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"optimizer": "sdg"}, "unknown optimizer 'sdg'; did you mean sgd?"),
        ({"optimizer": "sgd(nesterov=1)", "momentum": 0.9}, "sgd: nesterov 1 must be True or False"),
        ({"optimizer": "sgd(nesterov=True)"}, "Nesterov's momentum needs a --momentum above 0"),
        ({"optimizer": "adamw(betas=0.9)"}, "adamw: betas 0.9 must be two, as in betas=(0.9, 0.999)"),
        ({"optimizer": "adam(betas=(0.9, 1.0))"}, "adam: betas 1.0 must be at least 0 and below 1"),
        ({"optimizer": "adamw(eps=-1e-8)"}, "adamw: eps -1e-08 must be a number of at least 0"),
        ({"optimizer": "adamw(momentum=0.5)"}, "unexpected keyword argument 'momentum'"),
        ({"optimizer": 5}, "--optimizer 5: neither text nor an OptimizerFactory"),
    ],
)
def test_a_bad_optimizer_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Training(**{**GOOD, **settings})
    assert said in str(caught.value)


@dataclasses.dataclass(frozen=True)
class Riding:
    """Somebody's own optimizer."""

    alpha: float = 0.9

    def make(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        learning_rate: float,
        momentum: float,
        weight_decay: float,
    ) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(parameters, learning_rate, self.alpha, momentum=momentum)


def test_an_optimizer_of_ones_own() -> None:
    training = Training(**GOOD, momentum=0.25, optimizer=Riding())
    frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
    made = training.make_optimizer([nn.Parameter(torch.zeros(2)), frozen])
    assert isinstance(made, torch.optim.RMSprop)
    (group,) = made.param_groups
    assert (len(group["params"]), group["lr"], group["momentum"]) == (1, 0.1, 0.25)
    assert training.to_json()["optimizer"] == "tests.test_config:Riding"


def test_what_is_given_comes_before_the_defaults() -> None:
    defaults: dict[str, Json] = {
        "steps": 300,
        "batch_size": 32,
        "learning_rate": 0.1,
        "momentum": 0.9,
        "metric": "accuracy",
    }
    given: dict[str, Json] = {"steps": 5, "batch_size": None, "momentum": 0.0, "seed": 3}
    training = Training.resolve(defaults, given)
    assert training == Training(steps=5, batch_size=32, learning_rate=0.1, momentum=0.0, seed=3)


def test_json_holds_everything() -> None:
    training = Training(**GOOD, momentum=0.5, optimizer="adam", seed=2**62)
    told = json.loads(json.dumps(training.to_json()))
    assert Training(**told) == training
    assert set(told) == {field.name for field in dataclasses.fields(Training)}


@pytest.mark.parametrize(
    "error",
    [
        UnknownName("codec", "x", ["a"]),
        StorageError("model", "no room"),
        PeerLost(3, "its connection is gone"),
        DeadlinePassed(1, "a decision at step 3", 2.0),
        BadLabels("one class alone"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_copy_of_an_error_has_its_message_and_fields(error: FarflungError) -> None:
    other = copy.copy(error)  # as a copy in another process is made
    assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))
