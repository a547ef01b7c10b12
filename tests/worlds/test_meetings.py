"""What meets in one store meets again: handles, hooks and process groups, also where one rank has tried before."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import farflung
from farflung.errors import DeadlinePassed
from farflung.wall import LaunchEnv
from tests.ddp_jobs import group
from tests.helpers import PATIENCE_S
from tests.pool import Pool, digest


def trains_by_attach(rank: int, size: int, store: dist.Store) -> dict[str, torch.Tensor]:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    env = LaunchEnv(rank, size, rank, size)
    with farflung.attach(model, optimizer, launch_env=env, store=store, deadline_s=PATIENCE_S):
        model(torch.full((4, 3), float(rank))).sum().backward()
        optimizer.step()
    return dict(model.state_dict())


def trains_by_hook(rank: int, size: int, store: dist.Store) -> dict[str, torch.Tensor]:
    del size, store
    model = torch.nn.Linear(3, 1)
    ddp = DistributedDataParallel(model)
    state, hook = farflung.ddp_hook("int8", deadline_s=PATIENCE_S)
    ddp.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ddp(torch.full((4, 3), float(rank))).sum().backward()
    optimizer.step()
    state.close()
    return dict(model.state_dict())


TRAIN: dict[str, Callable[[int, int, dist.Store], dict[str, torch.Tensor]]] = {
    "attach": trains_by_attach,
    "hook": trains_by_hook,
}


def meets_again(rank: int, size: int, store: dist.Store, *, by: str) -> list[str]:
    """A job of the pool: rank 0 tries alone and gives up; then both train, twice, in half an environment."""
    os.environ.pop("RANK", None)
    os.environ["WORLD_SIZE"] = "7"
    module = {"attach": "farflung.handle", "hook": "farflung.ddp"}[by]
    ends = []
    with group(rank, size, dist.PrefixStore("group", store)) if by == "hook" else nullcontext():
        os.environ.pop("RANK", None)
        if rank == 0:
            alone = pytest.raises(DeadlinePassed, match=r"lost rank 1: .* its address in the store")
            with mock.patch(f"{module}._CONNECT_TIMEOUT_S", 0.2), alone:
                farflung.ddp_hook("int8") if by == "hook" else trains_by_attach(rank, size, store)
            store.set("tried", "")
        store.get("tried")
        for seed in (1, 2):
            torch.manual_seed(seed)
            ends.append(digest(TRAIN[by](rank, size, store)))
    return ends


@pytest.mark.parametrize("by", TRAIN)
def test_ranks_that_have_attached_unlike_numbers_of_times_train_together(by: str, pool: Pool) -> None:
    one, other = pool.run(2, f"{__name__}.meets_again", by=by)
    assert one == other
    assert one[0] != one[1], "two models, and not one that was taken twice"
