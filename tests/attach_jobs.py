"""The same loops under DistributedDataParallel and under farflung.attach, for the pool's workers."""

from __future__ import annotations

import contextlib
import copy
import itertools
import os
import runpy
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

import farflung
import farflung.recipes
from farflung.config import BUCKET_NBYTES
from farflung.engine.unused import UnusedParameters
from farflung.handle import Handle
from farflung.schedules import SCHEDULES, Delayed
from farflung.types import SharedStats, State
from farflung.wall import LaunchEnv
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

    @override
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


def scored_ahead(
    model: nn.Module, optimizer: torch.optim.Optimizer, no_sync: Callable[[], Any], rank: int
) -> None:
    """Batches by importance, scored while gradients are on their way."""
    del no_sync
    random = torch.Generator().manual_seed(7)
    data = TensorDataset(torch.randn(200, 12, generator=random), torch.randint(5, (200,), generator=random))

    def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    sampler = farflung.ImportanceSampler(data, 12, rank=rank, size=2, rule="two", candidates=3)
    loader = DataLoader(data, batch_sampler=sampler)
    batches = sampler.iter_batches(loader, getattr(model, "module", model), losses)
    for drawn, batch in batches:
        optimizer.zero_grad()
        drawn.reduce_losses(losses(model, batch)).backward()
        batches.prefetch()
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
    "scored_ahead": scored_ahead,
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


def sampled(rank: int, size: int, store: dist.Store, *, how: str = "synchronous") -> dict[str, Any]:
    """A loop whose sampler learns from all ranks when to draw by scores: few samples have nearly all there is to do."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    points = torch.randn(600, 3, generator=torch.Generator().manual_seed(0))
    points[::20] *= 30
    data, model = TensorDataset(points), nn.Linear(3, 1)

    def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
        found: Tensor = (model(batch[0]).squeeze(1) - 1).abs()
        return found

    optimizer, events = torch.optim.SGD(model.parameters(), lr=1e-4), list[Any]()
    sampler = farflung.ImportanceSampler(data, 4, candidates=5, scored_by="loss")
    with farflung.attach(model, optimizer, how, store=store, sampler=sampler, sink=events.append):
        for _ in range(2):
            batches = sampler.iter_batches(DataLoader(data, batch_sampler=sampler), model, losses)
            for drawn, batch in batches:
                optimizer.zero_grad()
                drawn.reduce_losses(losses(model, batch)).backward()
                batches.prefetch()
                optimizer.step()
    learned = {name: value for name, value in sampler.gain.state_dict().items() if name != "pending"}
    told = {event["step"]: event.get("rule") for event in events if event["event"] == "step"}
    return {"learned": learned, "told": told, "parameters": digest(dict(model.named_parameters()))}


def uneven(rank: int, size: int, store: dist.Store) -> str:
    """Rank 1 has more batches than rank 0."""
    try:
        with attached(rank, size, store) as handle:
            for x, y in batches(rank, 2 + rank):
                one_step(handle._model, handle._optimizer, x, y)
    except farflung.errors.PeerLost as error:
        return str(error)
    return "nothing"


def averages_buffers(rank: int, size: int, store: dist.Store) -> dict[str, Any]:
    """Running statistics inside and outside of averaged()."""
    with attached(rank, size, store) as handle:
        plain(handle._model, handle._optimizer, handle.no_sync, rank)
        own = dict(handle._model.named_buffers())["norm.running_mean"].clone()
        with handle.use_averaged_model() as model:
            mean = dict(model.named_buffers())["norm.running_mean"].clone()
        after = dict(handle._model.named_buffers())["norm.running_mean"]
        return {"own": own, "mean": mean, "kept": torch.equal(own, after)}


def after_the_end(rank: int, size: int, store: dist.Store) -> list[str]:
    """What a handle says that has finished."""
    said = []
    with attached(rank, size, store) as handle:
        plain(handle._model, handle._optimizer, handle.no_sync, rank)
        spent_s = handle.communication_cpu_s
    for ask in (handle.state_dict, handle.use_averaged_model().__enter__):
        try:
            ask()
        except farflung.errors.RunLost as error:
            said.append(str(error))
    assert handle.communication_cpu_s >= spent_s
    return said


def breaks_off(rank: int, size: int, store: dist.Store) -> str:
    """A backward pass that fails half-way on rank 1, after part of its gradients have left."""

    class Fails(torch.autograd.Function):
        @staticmethod
        @override
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        @override
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


class Observed(Delayed):
    """Its delay is another one once it is told of the step at which one replica skips its update."""

    has_late_results = True

    @override
    def update_state(self, state: State, stats: SharedStats) -> State:
        """As if an exchange took two steps from there on."""
        return super().update_state(
            state, replace(stats, step_s=1.0, exchange_s=2.0 if stats.step >= 3 else 0.0)
        )


def delayed(
    rank: int, size: int, store: dist.Store, *, how: str, loop: str, cut: int = 0, first: str = "attach"
) -> dict[str, Any]:
    """A loop of one's own under a schedule that is late, cut in two by a checkpoint where that is asked for."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    recipe = farflung.recipes.parse_recipe("synchronous").with_components(schedule=how)
    found: dict[str, Any] = {}
    with mock.patch.dict(SCHEDULES, observed=Observed):
        handle = farflung.attach(model, optimizer, recipe, store=store)
    if cut:
        for x, y in itertools.islice(batches(rank), cut):
            one_step(model, optimizer, x, y)
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), handle.state_dict()))
        handle.finish()
        torch.manual_seed(1)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if first == "attach":
            handle = farflung.attach(model, optimizer, recipe, store=dist.PrefixStore("again", store))
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        if first == "load":
            handle = farflung.attach(model, optimizer, recipe, store=dist.PrefixStore("again", store))
        handle.load_state_dict(kept[2])
        for x, y in itertools.islice(batches(rank), cut, None):
            one_step(model, optimizer, x, y)
    else:
        {**LOOPS, "scaled_alone": scaled_alone}[loop](model, optimizer, handle.no_sync, rank)
    found["own"] = digest(dict(model.named_parameters()))
    found["buffers"] = digest(dict(model.named_buffers()))
    with handle.use_averaged_model():
        found["averaged"] = digest(dict(model.named_parameters()))
    found["after"] = digest(dict(model.named_parameters()))
    handle.finish()
    found["end"] = digest(dict(model.named_parameters()))
    return found


def freezes(rank: int, size: int, store: dist.Store, *, codec: str) -> list[str]:
    """A layer before and after steps in which it is frozen, and all others."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    env = LaunchEnv(rank, size, rank, size)
    recipe = recipe_of("synchronous").with_components(codec=codec)
    parts = []
    with farflung.attach(model, optimizer, recipe, launch_env=env, store=store), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, (x, y) in enumerate(batches(rank)):
            if number == 3:
                model.inner.requires_grad_(False)
                parts += [digest(dict(layer.named_parameters())) for layer in (model.inner, model.outer)]
            one_step(model, optimizer, x, y)
        parts += [digest(dict(layer.named_parameters())) for layer in (model.inner, model.outer)]
    return [parts[0], parts[2], parts[1], parts[3]]


MASK = torch.full((32, 32), torch.finfo(torch.float32).min).triu(1)


class Adapted(nn.Module):
    """A frozen base in bytes, one in floats, a mask, a statistic, and what trains."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", MASK.clone(), persistent=False)
        self.register_buffer("table", torch.ones(1), persistent=False)
        self.register_buffer("statistic", torch.zeros(3, dtype=torch.float16))
        self.base = nn.Parameter(torch.full((4096,), 200, dtype=torch.uint8), requires_grad=False)
        self.inner = nn.Linear(12, 1000).requires_grad_(False)
        self.adapter = nn.Linear(12, 5)

    @override
    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.adapter(x) + self.inner(x).mean()
        return y


def trains_an_adapter(
    rank: int, size: int, store: dist.Store, *, how: str, seed_step: int = 0, changed: bool = False
) -> dict[str, Any]:
    """What an evaluation sees of the base, and sends; what a state holds.

    Args:
      rank: of this replica.
      size: the number of replicas.
      store: where they meet.
      how: the recipe.
      seed_step: between the seeds of two ranks.
      changed: whether what does not train is changed besides, unlike on each rank.
    """
    torch.manual_seed(seed_step * rank)
    model = Adapted()
    optimizer = torch.optim.SGD(model.adapter.parameters(), lr=0.1)
    env = LaunchEnv(rank, size, rank, size)
    with farflung.attach(model, optimizer, recipe_of(how), launch_env=env, store=store) as handle:
        start = sum(handle.sent_nbytes_by_purpose.get("start", [0]))
        for x, y in batches(rank, 3):
            one_step(model, optimizer, x, y)
        if changed:
            with torch.no_grad():
                model.get_buffer("statistic").fill_(torch.finfo(torch.float16).max - 2048 * rank)
                model.inner.bias.fill_(rank)
            model.register_buffer("table", torch.arange(4.0 + rank))
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with handle.use_averaged_model():
            inside = {
                name: tensor.detach().clone()
                for name, tensor in (*model.named_parameters(), *model.named_buffers())
            }
        return {
            "start": start,
            "inside": inside,
            "restored": all(torch.equal(before[name], value) for name, value in model.state_dict().items()),
            "names": {*handle.state_dict()["model"]},
            "evaluation": sum(handle.sent_nbytes_by_purpose.get("evaluation", [0])),
        }


class WithoutRate(torch.optim.Optimizer):
    """Sets its rates by itself, as Adafactor does with ``lr=None``."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": None})

    @override
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.sub_(p.grad.sign(), alpha=0.01)


def goes_back(rank: int, size: int, store: dist.Store, *, how: str) -> tuple[str, str]:
    """What the same steps lead to twice, from a state in the middle."""
    torch.manual_seed(0)
    model = Net()
    optimizer = WithoutRate(model.parameters())
    env = LaunchEnv(rank, size, rank, size)
    ends = []
    with farflung.attach(model, optimizer, recipe_of(how), launch_env=env, store=store) as handle:
        for x, y in itertools.islice(batches(rank), 3):
            one_step(model, optimizer, x, y)
        kept = copy.deepcopy((model.state_dict(), handle.state_dict()))
        for _ in range(2):
            for x, y in itertools.islice(batches(rank), 3, 5):
                one_step(model, optimizer, x, y)
            F.cross_entropy(model(x), y).backward()
            if how != "synchronous":
                optimizer.step()
            ends.append(digest(dict(model.named_parameters())))
            model.load_state_dict(kept[0])
            handle.load_state_dict(copy.deepcopy(kept[1]))
    return ends[0], ends[1]


def resumes_apart(rank: int, size: int, store: dist.Store, *, how: str, steps: Sequence[int]) -> str:
    """What is said where each rank loads a checkpoint of a step of its own, as after a crash between two writes."""
    model, env = Net(), LaunchEnv(rank, size, rank, size)
    optimizer = WithoutRate(model.parameters())
    states: list[State] = []
    try:
        for place in ("first", "second"):
            own = dist.PrefixStore(place, store)
            with farflung.attach(model, optimizer, recipe_of(how), launch_env=env, store=own) as handle:
                if place == "second" and steps[rank]:
                    handle.load_state_dict(states[steps[rank]])
                for x, y in itertools.islice(batches(rank), 3):
                    states.append(copy.deepcopy(handle.state_dict()))
                    one_step(model, optimizer, x, y)
    except farflung.errors.CheckpointError as error:
        return str(error)
    return "nothing"


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """What every loop does."""
    optimizer.zero_grad(set_to_none=True)
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def example(
    rank: int, size: int, store: dist.Store, *, script: str, options: list[str], port: int, attempt: str
) -> None:
    """A script as torchrun starts it; the pool's store is torchrun's."""
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RESTART_COUNT=attempt,
    )
    with mock.patch.object(sys, "argv", [script, *options]):
        runpy.run_path(script, run_name="__main__")


# --- what goes wrong in silence elsewhere -----------------------------------------------------------------------


class Branches(nn.Module):
    """A stem, and branches of which a forward pass uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(12, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 5) for _ in range(3))

    @override
    def forward(self, x: Tensor, used: list[int]) -> Tensor:
        hidden = torch.relu(self.stem(x))
        out: Tensor = sum(self.branches[index](hidden) for index in used)
        return out


USED = [[[0], [0]], [[0, 1], [0]], [[0], [0, 1]], [[1], [1]], [[0, 1], [0, 1]], [[1], [0]]]
"""At each step, on each of two ranks; nobody ever uses the last branch."""


def states_of_others(rank: int, size: int, store: dist.Store) -> list[str]:
    """What a handle says to states that are not its own."""
    said = []
    with attached(rank, size, store) as handle:
        own = handle.state_dict()
        handle.load_state_dict(own)
        others: list[dict[str, Any]] = [{**own, "rank": 1 - rank}, {**own, "buckets": [3]}, {"model": {}}]
        others += [{**own, "recipe": {**own["recipe"], name: "other"}} for name in ("codec", "schedule")]
        for other in others:
            try:
                handle.load_state_dict(other)
            except farflung.errors.CheckpointError as error:
                said.append(str(error))
    return said


def unused(
    rank: int,
    size: int,
    store: dist.Store,
    *,
    how: str = "",
    codec: str = "identity",
    bucket_nbytes: int = BUCKET_NBYTES,
    optimizer: str = "sgd",
) -> dict[str, Any]:
    """Branches that some or all ranks leave out, with weight decay and momentum, under DDP where ``how`` is empty."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    torch.manual_seed(0)
    model = Branches()
    first = copy.deepcopy(model.state_dict())
    chosen = (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
        if optimizer == "sgd"
        else torch.optim.AdamW(model.parameters(), lr=0.01)
    )

    def train(trained: nn.Module) -> list[list[str]]:
        without = []
        for (x, y), used in zip(batches(rank), USED, strict=True):
            chosen.zero_grad()
            F.cross_entropy(trained(x, used[rank]), y).backward()
            without.append([name for name, p in model.named_parameters() if p.grad is None])
            chosen.step()
        return without

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if how:
            recipe = recipe_of(how).with_components(codec=codec, bucket_nbytes=bucket_nbytes)
            with (
                mock.patch.object(
                    UnusedParameters,
                    "exchange_zero_places",
                    autospec=True,
                    side_effect=UnusedParameters.exchange_zero_places,
                ) as told,
                farflung.attach(model, chosen, recipe, store=store) as handle,
            ):
                without = train(model)
            sent = handle._engine.sent_nbytes
            asked = [call.args[2] for call in told.call_args_list]
        else:
            dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
            try:
                without = train(DistributedDataParallel(model, find_unused_parameters=True))
                sent, asked = 0, []
            finally:
                leave_group()
    return {
        "end": digest(dict(model.named_parameters())),
        "never": torch.equal(first["branches.2.weight"], model.state_dict()["branches.2.weight"]),
        "without": without,
        "sent": sent,
        "asked": asked,
    }


def recipe_of(schedule: str) -> farflung.Recipe:
    return farflung.recipes.parse_recipe("synchronous").with_components(schedule=schedule)


def refusals(rank: int, size: int, store: dist.Store) -> dict[str, str]:
    """What attach says to models and optimizers that it cannot go with, before it waits for anybody."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    said = {}

    def refused(
        name: str, model: nn.Module, optimizer: Any = None, how: str = "synchronous", **options: Any
    ) -> None:
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            with farflung.attach(
                model, optimizer, recipe_of(how), store=dist.PrefixStore(name, store), **options
            ):
                said[name] = "nothing"
        except farflung.errors.ConfigError as error:
            said[name] = str(error)

    dist.init_process_group("gloo", store=dist.PrefixStore("group", store), rank=rank, world_size=size)
    try:
        wrapped = DistributedDataParallel(Net())
        refused("ddp", wrapped)
        refused("ddp inside", nn.Sequential(wrapped))
        del wrapped
    finally:
        leave_group()
    refused("another's optimizer", Net(), torch.optim.SGD(Net().parameters(), lr=0.1))
    model, other = Net(), nn.Linear(2, 2)
    both = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    refused("foreign parameters", model, both)
    refused("sparse", nn.Sequential(nn.Embedding(4, 4, sparse=True), nn.Linear(4, 4)))
    refused("lazy", nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4)))
    refused("lazy buffer", nn.Sequential(nn.Linear(4, 4), nn.LazyBatchNorm1d(affine=False)))
    refused("complex", nn.Linear(4, 4, dtype=torch.complex64))
    model = Net()
    refused("closure", model, torch.optim.LBFGS(model.parameters()), "pipelined(2)")
    refused("closure, delayed", model, torch.optim.LBFGS(model.parameters()), "delayed(2)")
    refused("nonfinite", model, nonfinite="perhaps")
    refused("no values", nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta")))
    expanded = nn.Linear(2, 2)
    expanded.register_buffer("mask", torch.ones(1, 4).expand(3, 4))
    refused("expanded", expanded)
    listed = nn.Linear(2, 2)
    listed.register_buffer("graph", torch.eye(3).to_sparse())
    refused("sparse buffer", listed)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with farflung.attach(model, optimizer, store=dist.PrefixStore("first", store)):
        refused("twice", model, optimizer)
    refused("again", model, optimizer)
    return said


def said_once(rank: int, size: int, store: dist.Store, *, kind: str) -> list[str]:
    """What a loop is told that leaves farflung out of some of its steps."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "unfrozen":
        model.inner.requires_grad_(False)
    x, y = next(batches(rank))

    def step(backward: Callable[[Tensor], object]) -> None:
        optimizer.zero_grad()
        backward(F.cross_entropy(model(x), y))
        optimizer.step()

    def by_grad(loss: Tensor) -> None:
        for p, grad in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            p.grad = grad

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with farflung.attach(model, optimizer, store=store) as handle:
                step(Tensor.backward)
                if kind == "unfrozen":
                    model.inner.requires_grad_(True)
                elif kind == "replaced":
                    model.inner = nn.Linear(model.inner.in_features, model.inner.out_features)
                elif kind.startswith("added"):
                    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
                for _ in range(2):
                    if kind.endswith("no_sync"):
                        with handle.no_sync():
                            step(Tensor.backward)
                    else:
                        step(by_grad if kind == "grad" else Tensor.backward)
            if kind == "finished":
                for _ in range(2):
                    step(Tensor.backward)
            if kind == "again":
                with farflung.attach(model, optimizer, store=dist.PrefixStore("again", store)):
                    step(Tensor.backward)
        except farflung.errors.ConfigError as error:
            return [str(error)]
    return [str(each.message) for each in caught]


class Checkpointed(nn.Module):
    """Layers inside and outside of reentrant checkpoints; one of them is never used."""

    def __init__(self, places: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.spare = nn.Linear(2, 2) if "s" in places else None
        self.places = places

    @override
    def forward(self, x: Tensor) -> Tensor:
        x.requires_grad_(True)
        for layer, place in zip(self.layers, self.places, strict=False):
            if place == "n":  # one inside another
                x = checkpoint(partial(checkpoint, layer, use_reentrant=True), x, use_reentrant=True)
            else:
                x = checkpoint(layer, x, use_reentrant=True) if place == "c" else layer(x)
        return x[:, :5]


def checkpointed(
    rank: int, size: int, store: dist.Store, *, places: str, how: str = "synchronous"
) -> dict[str, str]:
    """Reentrant checkpoints, and the same without."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    ends = {}
    for kind in (places, places.replace("c", "-").replace("n", "-")):
        torch.manual_seed(0)
        model = Checkpointed(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with farflung.attach(model, optimizer, recipe_of(how), store=dist.PrefixStore(kind, store)):
                plain(model, optimizer, contextlib.nullcontext, rank)
        ends["with" if kind == places else "without"] = digest(dict(model.named_parameters()))
    return ends


def shared_by_checkpoints(rank: int, size: int, store: dist.Store) -> str:
    """A layer in two reentrant checkpoints, whose gradient comes in two parts."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    model = Checkpointed("cc--")
    model.layers[1] = model.layers[0]
    try:
        with farflung.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), store=store):
            model(torch.ones(2, 12)).sum().backward()
    except farflung.errors.FarflungError as error:
        return str(error)
    return "nothing"


def odd_buffers(rank: int, size: int, store: dist.Store) -> dict[str, Any]:
    """Complex, whole and boolean buffers at the start and inside of averaged()."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    model = nn.Linear(2, 2)
    model.register_buffer("phase", torch.full((3,), complex(rank, 1)))
    model.register_buffer("seen", torch.tensor([bool(rank), True]))
    with farflung.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), store=store) as handle:
        start = {name: value.clone() for name, value in model.named_buffers()}
        model.get_buffer("phase").fill_(complex(rank, 2 * rank))
        with handle.use_averaged_model():
            mean = model.get_buffer("phase").clone()
        return {"start": start, "mean": mean, "own": model.get_buffer("phase").clone()}


def compiled_step(rank: int, size: int, store: dist.Store, *, how: str) -> dict[str, str]:
    """A compiled optimizer step, and a plain one."""
    ends = {}
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    for kind in ("plain", "compiled"):
        torch.manual_seed(0)
        model = nn.Linear(12, 5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        with farflung.attach(model, optimizer, recipe_of(how), store=dist.PrefixStore(kind, store)):
            step = (
                torch.compile(optimizer.step, backend="aot_eager") if kind == "compiled" else optimizer.step
            )
            for x, y in batches(rank):
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                step()
        ends[kind] = digest(dict(model.named_parameters()))
    return ends


class Deep(nn.Module):
    """A block of many layers, with buffers of unlike types and shapes."""

    TYPES = (
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.uint16,
        torch.uint32,
        torch.uint64,
        torch.complex64,
        torch.bool,
        torch.int64,
    )

    def __init__(self, seed: int) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(160))
        for number, dtype in enumerate(self.TYPES):
            self.register_buffer(
                f"buffer{number}", torch.randint(0, 100, (2, 3), generator=random).to(dtype).t()
            )
            self.register_buffer(f"single{number}", torch.randint(0, 100, (), generator=random).to(dtype))
        self.seen = "nothing"

    def get_extra_state(self) -> dict[str, str]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, str]) -> None:
        self.seen = state["seen"]

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + 0.1 * layer(x)
        return x


def many_tensors(rank: int, size: int, store: dist.Store, *, how: str) -> dict[str, str]:
    """What each rank starts and ends with."""
    torch.manual_seed(rank)
    model = Deep(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    env = LaunchEnv(rank, size, rank, size)

    def state() -> str:
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        return digest(
            {name: t.detach().contiguous().reshape(-1).view(torch.uint8) for name, t in tensors.items()}
        )

    with farflung.attach(model, optimizer, recipe_of(how), launch_env=env, store=store) as handle:
        start = state()
        with handle.join() if how == "synchronous" else contextlib.nullcontext():
            for _ in range(2 + rank * (how == "synchronous")):
                optimizer.zero_grad()
                model(torch.full((2, 4), 0.1 + rank)).square().mean().backward()
                optimizer.step()
    return {"start": start, "end": state()}


class Typed(nn.Module):
    """Layers whose parameters are of some types, one after the other."""

    def __init__(self, dtypes: tuple[torch.dtype, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, dtype=dtype) for dtype in dtypes)

    @override
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.to(next(layer.parameters()).dtype)).tanh()
        return x.float()


TYPES = {
    "bfloat16": (torch.bfloat16,),
    "float16": (torch.float16,),
    "float64": (torch.float64,),
    "mixed": (torch.float32, torch.bfloat16, torch.float64),
}


def of_types(rank: int, size: int, store: dist.Store, *, how: str) -> dict[str, str]:
    """What models of other types than float32 end with; empty where there is a number that is none."""
    ends = {}
    for name, dtypes in TYPES.items():
        torch.manual_seed(rank)
        model = Typed(dtypes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        env, random = LaunchEnv(rank, size, rank, size), torch.Generator().manual_seed(rank)
        with farflung.attach(model, optimizer, how, launch_env=env, store=dist.PrefixStore(name, store)):
            for _ in range(4):
                optimizer.zero_grad()
                model(torch.randn(4, 8, generator=random)).square().mean().backward()
                optimizer.step()
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
        ends[name] = digest(dict(model.named_parameters())) if finite else ""
    return ends


def alone(rank: int, size: int, store: dist.Store) -> str:
    """Only rank 0 asks for the averaged model."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    model = Net()
    try:
        with farflung.attach(
            model, torch.optim.SGD(model.parameters(), lr=0.1), store=store, deadline_s=0.5
        ) as handle:
            plain(model, handle._optimizer, handle.no_sync, rank)
            if rank == 0:
                with handle.use_averaged_model():
                    pass
            else:
                store.wait(["told"], timedelta(seconds=60))
    except farflung.errors.FarflungError as error:
        store.set("told", "")
        return str(error)
    return "nothing"


def nonfinite(rank: int, size: int, store: dist.Store, *, what: str, how: str) -> dict[str, Any]:
    """Rank 1's inner layer has a gradient that is no number at one step, when other buckets have left."""
    env = LaunchEnv(rank, size, rank, size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    chosen = recipe_of(how).with_components(bucket_nbytes=100)
    trail = []
    try:
        with farflung.attach(model, optimizer, chosen, launch_env=env, store=store, nonfinite=what) as handle:
            for number, (x, y) in enumerate(batches(rank)):
                optimizer.zero_grad()
                loss = F.cross_entropy(model(x), y)
                spoil = (
                    model.get_parameter("0.weight").register_hook(lambda g: g * float("nan"))
                    if (number, rank) == (2, 1)
                    else None
                )
                loss.backward()
                if spoil:
                    spoil.remove()
                optimizer.step()
                trail.append(digest(dict(model.named_parameters())))
            handle.finish()
    except farflung.errors.NonFinite as error:
        return {"said": str(error), "trail": trail}
    return {
        "said": "",
        "trail": trail,
        "finite": all(bool(p.isfinite().all()) for p in model.parameters()),
        "end": digest(dict(model.named_parameters())),
    }


def joins(rank: int, size: int, store: dist.Store, *, codec: str = "identity") -> dict[str, Any]:
    """Ranks with unlike numbers of batches, and the same means on one process where that is asked for."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size))
    counts = [3, 6, 0, 5][:size]
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    recipe = recipe_of("synchronous").with_components(codec=codec)
    with farflung.attach(model, optimizer, recipe, store=store) as handle, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            with handle.join():
                for x, y in batches(rank, counts[rank]):
                    optimizer.zero_grad()
                    F.cross_entropy(model(x, [0]), y).backward()
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                    optimizer.step()
        figures = {
            "sent": handle.sent_nbytes,
            "sent to": handle.sent_nbytes_by_purpose,
            "waited": handle.waited_s,
            "step": handle.step,
        }
    momentum = {
        str(n): optimizer.state[p]["momentum_buffer"]
        for n, p in enumerate(model.parameters())
        if p in optimizer.state
    }
    return {"end": dict(model.state_dict()), "momentum": momentum, **figures}


def joined_alone(counts: list[int]) -> dict[str, Tensor]:
    """What :func:`joins` comes to on one process: means over those that have data."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    for _ in range(2):
        every = [list(batches(rank, count)) for rank, count in enumerate(counts)]
        for step in range(max(counts)):
            with_data = [each[step] for each in every if step < len(each)]
            optimizer.zero_grad()
            (sum(F.cross_entropy(model(x, [0]), y) for x, y in with_data) / len(with_data)).backward()  # type: ignore[union-attr]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return dict(model.state_dict())


def step_functions(rank: int, size: int, store: dist.Store) -> tuple[list[str], set[str]]:
    """Returns farflung's functions of a bucket from autograd's hook to the socket, and those of the whole step.

    The first are in the order of calls; the second are those of both threads without comprehensions.
    """
    handle = attached(rank, size, store)
    thread = handle._runtime._thread
    path: dict[str, None] = {}
    functions: set[str] = set()

    def is_ours(frame: FrameType) -> bool:
        return str(frame.f_globals.get("__name__")).startswith("farflung.")

    def keep(frame: FrameType | None) -> None:
        passed = []
        while frame is not None:
            if is_ours(frame):
                passed.append(frame.f_code.co_qualname)
            frame = frame.f_back
        path.update(dict.fromkeys(reversed(passed)))

    def training(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and is_ours(frame):
            functions.add(frame.f_code.co_qualname)
            if frame.f_code is type(thread).launch.__code__ and not path:
                keep(frame)

    def communication(frame: FrameType, event: str, called: object) -> None:
        if event == "call" and is_ours(frame):
            functions.add(frame.f_code.co_qualname)
        if event == "c_call" and getattr(called, "__name__", "") == "sendmsg":
            keep(frame)

    with handle:
        for step, (inputs, targets) in enumerate(itertools.islice(batches(rank), 4)):
            loss = F.cross_entropy(handle._model(inputs), targets)
            if step == 3:
                thread.call_soon(lambda: sys.setprofile(communication))
                sys.setprofile(training)
            loss.backward()
            handle._optimizer.step()
            handle._optimizer.zero_grad()
        sys.setprofile(None)
        thread.call_soon(lambda: sys.setprofile(None))
    return [*path], {name for name in functions if not name.rpartition(".")[2].startswith("<")}


def loses(rank: int, size: int, store: dist.Store, lost: int, how: str, end: str) -> dict[str, Any]:
    """One of three leaves, or fails; the others share out the batches of each step among those that are left."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    env = LaunchEnv(rank, size, rank, size)
    chosen = farflung.recipes.parse_recipe("ring").with_components(schedule=how)
    handle = farflung.attach(model, optimizer, chosen, elastic=2, launch_env=env, store=store)
    data = list(batches(0, 60))
    members, cursor = [], 0
    for step in range(16):
        if rank == lost and step == 5:
            handle.leave() if end == "leaves" else handle._close(RuntimeError("its battery is empty"))
            handle.leave()  # changes nothing any more
            return {}
        members.append(handle.members)
        x, y = data[(cursor + handle.members.index(rank)) % len(data)]
        cursor += handle.size
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    handle.finish()
    return {"members": members, "digest": digest(dict(model.named_parameters()))}
