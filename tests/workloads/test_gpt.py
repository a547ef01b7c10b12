"""The small transformer: nobody sees what is to be predicted, and its size is the published one."""

from __future__ import annotations

import math

import torch

from farflung.types import Batch
from farflung.workloads import create_workload


def test_a_position_sees_itself_and_those_before_it_and_nothing_else() -> None:
    model = create_workload("tinyshakespeare/gpt").build_model(torch.Generator().manual_seed(0)).eval()
    one = torch.randint(65, (1, 64), generator=torch.Generator().manual_seed(1))
    other = one.clone()
    other[0, 40] = (one[0, 40] + 1) % 65
    with torch.no_grad():
        differ = (model(one) - model(other)).abs().amax(dim=2)[0] > 0
    assert not differ[:40].any()
    assert differ[40:].all()


def test_it_has_as_many_parameters_as_its_original() -> None:
    model = create_workload("tinyshakespeare/gpt").build_model(torch.Generator().manual_seed(0))
    blocks = 4 * (12 * 128 * 128 + 2 * 128)
    assert sum(p.numel() for p in model.parameters()) == blocks + 128 + (65 + 64) * 128


def test_before_training_it_knows_nothing() -> None:
    task = create_workload("tinyshakespeare/gpt")
    symbols = torch.randint(65, (8, 65), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        losses = task.compute_losses(
            task.build_model(torch.Generator().manual_seed(0)), Batch(symbols[:, :-1], symbols[:, 1:])
        )
    assert abs(float(losses.mean()) - math.log(65)) < 0.1
