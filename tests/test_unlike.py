"""Ranks that were started unlike are told apart at the start, by the name of what differs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from farflung.loop import describe_optimizer
from tests.pool import Pool


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("shape", "ranks disagree on model: "),
        ("rate", "ranks disagree on optimizer's lr: [0."),
        ("optimizer", "ranks disagree on optimizer: '"),
    ],
)
def test_unlike_ranks_are_refused_by_name(pool: Pool, what: str, says: str) -> None:
    assert all(said.startswith(says) for said in pool.run(2, "tests.unlike_jobs.attaches", what=what))


def test_the_settings_of_an_optimizer_are_those_that_change_what_it_computes() -> None:
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [
        {"params": [model.weight], "lr": torch.tensor(0.5)},
        {"params": [model.bias]},
    ]
    told = describe_optimizer(torch.optim.AdamW(groups, lr=0.1, betas=(0.8, 0.9), foreach=True))
    assert told["optimizer"] == "AdamW"
    assert told["optimizer's lr"] == [0.5, 0.1]
    assert told["optimizer's betas"] == [[0.8, 0.9], [0.8, 0.9]]
    assert not {"optimizer's params", "optimizer's foreach", "optimizer's fused"} & told.keys()
