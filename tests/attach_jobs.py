"""The same loops under DistributedDataParallel and under farflung.attach, for the pool's workers."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import farflung
import farflung.recipes
from farflung.attach import Handle
from tests.pool import digest, leave_group

STEPS = 6
Loop = Callable[[nn.Module, torch.optim.Optimizer, Callable[[], Any], int], None]


class Net(nn.Module):
    """A few layers of unlike kinds, one of them not always used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 32)
        self.norm = nn.BatchNorm1d(32)
        self.outer = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.outer(torch.relu(self.norm(self.inner(x))))
        return y


def batches(rank: int, count: int = STEPS) -> Iterator[tuple[Tensor, Tensor]]:
    """Each rank's own data."""
    random = torch.Generator().manual_seed(100 + rank)
    for _ in range(count):
        yield torch.randn(12, 12, generator=random), torch.randint(5, (12,), generator=random)


def plain(model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any], rank: int) -> None:
    for x, y in batches(rank):
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def kept_gradients(
    model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any], rank: int
) -> None:
    for x, y in batches(rank):
        optimizer.zero_grad(set_to_none=False)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def scheduled(
    model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any], rank: int
) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for x, y in batches(rank):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()


def accumulated(
    model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any], rank: int
) -> None:
    for number, (x, y) in enumerate(batches(rank)):
        last = number % 3 == 2
        with contextlib.nullcontext() if last else no_sync():
            F.cross_entropy(model(x), y).backward()
        if last:
            optimizer.step()
            optimizer.zero_grad()


def evaluated(
    model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any], rank: int
) -> None:
    for x, y in batches(rank):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            model(x)
        model.train()


def several_forwards(
    model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any], rank: int
) -> None:
    both = zip(batches(rank), batches(rank + 10), strict=True)
    for (x, y), (v, w) in both:
        optimizer.zero_grad()
        out = model(torch.cat((x, v)))
        again = (
            model(v.flip(0)) if not isinstance(model, DistributedDataParallel) else model.module(v.flip(0))
        )
        (F.cross_entropy(out, torch.cat((y, w))) + F.cross_entropy(again, w.flip(0))).backward()
        optimizer.step()


def two_backwards(
    model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any], rank: int
) -> None:
    for (x, y), (v, w) in zip(batches(rank), batches(rank + 10), strict=True):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        F.cross_entropy(model(v), w).backward()
        optimizer.step()


def caught(model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any], rank: int) -> None:
    for number, (x, y) in enumerate(batches(rank)):
        optimizer.zero_grad()
        try:
            loss = F.cross_entropy(model(x), y)
            if number == 2:
                raise ValueError("a bad batch")
        except ValueError:
            continue
        loss.backward()
        optimizer.step()


def autocast(
    model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any], rank: int
) -> None:
    for x, y in batches(rank):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()


def scaled(model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any], rank: int) -> None:
    """One rank overflows at one step: all skip it."""
    assert overflown(model, optimizer, rank) < 2.0**13


def scaled_alone(
    model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any], rank: int
) -> None:
    """One rank overflows at one step: it alone skips it."""
    assert (overflown(model, optimizer, rank) < 2.0**13) == (rank == 1)


def overflown(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> float:
    """The scale at the end of a loop in which rank 1 overflows."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for number, (x, y) in enumerate(batches(rank)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        if number == 3 and rank == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return scaler.get_scale()


LOOPS: dict[str, Loop] = {
    "plain": plain,
    "kept_gradients": kept_gradients,
    "scheduled": scheduled,
    "accumulated": accumulated,
    "evaluated": evaluated,
    "several_forwards": several_forwards,
    "two_backwards": two_backwards,
    "caught": caught,
    "autocast": autocast,
    "scaled": scaled,
}


def _made(compiled: bool) -> tuple[nn.Module, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    wrapped = torch.compile(model, backend="aot_eager") if compiled else model
    return model, wrapped, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)  # type: ignore[return-value]


def attached(rank: int, size: int, store: dist.Store, *, how: str = "synchronous", at: int = 0) -> Handle:
    """A handle on a fresh model."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    torch.manual_seed(at)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return farflung.attach(model, optimizer, how, store=store)


def compare(rank: int, size: int, store: dist.Store, *, loop: str, compiled: bool = False) -> dict[str, str]:
    """What both end with."""
    group = dist.PrefixStore("ddp", store)
    dist.init_process_group("gloo", store=group, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        theirs = _by_ddp(loop, rank)
    finally:
        leave_group()
    ours, model, optimizer = _made(compiled)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    with farflung.attach(model, optimizer, store=store) as handle:
        LOOPS[loop](model, optimizer, handle.no_sync, rank)
    return {
        "theirs": theirs,
        "ours": digest(dict(ours.named_parameters())),
    }


def _by_ddp(loop: str, rank: int) -> str:
    theirs, _, optimizer = _made(compiled=False)
    wrapped = DistributedDataParallel(theirs, broadcast_buffers=False)
    LOOPS[loop](wrapped, optimizer, wrapped.no_sync, rank)
    return digest(dict(theirs.named_parameters()))


def starts_alike(rank: int, size: int, store: dist.Store) -> str:
    """Rank 0's parameters everywhere, though each rank made its own."""
    with attached(rank, size, store, at=rank) as handle:
        return digest(dict(handle._model.state_dict()))


def averages_buffers(rank: int, size: int, store: dist.Store) -> dict[str, Any]:
    """Running statistics inside and outside of averaged()."""
    with attached(rank, size, store) as handle:
        plain(handle._model, handle._optimizer, handle.no_sync, rank)
        own = dict(handle._model.named_buffers())["norm.running_mean"].clone()
        with handle.averaged() as model:
            mean = dict(model.named_buffers())["norm.running_mean"].clone()
        after = dict(handle._model.named_buffers())["norm.running_mean"]
        return {"own": own, "mean": mean, "kept": torch.equal(own, after)}


def breaks_off(rank: int, size: int, store: dist.Store) -> str:
    """A backward pass that fails half-way on rank 1, after part of its gradients have left."""

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            raise ValueError("half-way")

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    torch.manual_seed(0)
    inner, outer = nn.Linear(4, 4), nn.Linear(4, 4).double()
    model = nn.ModuleList([inner, outer])
    try:
        with farflung.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), store=store):
            for _ in range(2):
                hidden = inner(torch.ones(2, 4))
                with contextlib.suppress(ValueError):
                    outer((Fails.apply(hidden) if rank == 1 else hidden).double()).sum().backward()
    except farflung.errors.FarflungError as error:
        return str(error)
    return "nothing was noticed"


def delayed(rank: int, size: int, store: dist.Store, *, how: str, loop: str, cut: int = 0) -> dict[str, Any]:
    """A loop of one's own under a schedule that is late, cut in two by a checkpoint where that is asked for."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    recipe = farflung.recipes.recipe("synchronous").but(schedule=how)
    found: dict[str, Any] = {}
    handle = farflung.attach(model, optimizer, recipe, store=store)
    if cut:
        for x, y in itertools.islice(batches(rank), cut):
            one_step(model, optimizer, x, y)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
        handle.finish()
        torch.manual_seed(1)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        handle = farflung.attach(model, optimizer, recipe, store=dist.PrefixStore("again", store))
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        handle.load_state_dict(kept[2])
        for x, y in itertools.islice(batches(rank), cut, None):
            one_step(model, optimizer, x, y)
    else:
        {**LOOPS, "scaled_alone": scaled_alone}[loop](model, optimizer, handle.no_sync, rank)
    found["own"] = digest(dict(model.named_parameters()))
    with handle.averaged():
        found["averaged"] = digest(dict(model.named_parameters()))
    found["after"] = digest(dict(model.named_parameters()))
    handle.finish()
    found["end"] = digest(dict(model.named_parameters()))
    return found


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """What every loop does."""
    optimizer.zero_grad(set_to_none=True)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()
