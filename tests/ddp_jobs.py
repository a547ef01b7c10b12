"""Training under DistributedDataParallel with farflung's hook, for the pool's workers."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import farflung
from farflung.ddp import HookState, exchange
from farflung.errors import FarflungError, PeerLost
from farflung.recipes import Recipe
from farflung.reducers.base import build_result, compute_numerator, pack_metadata
from farflung.state_trees import load_tree, save_tree
from farflung.tasks import Pending, create_completed
from farflung.types import (
    Channel,
    CodecState,
    Contribution,
    Reducer,
    ReduceResult,
    Seeds,
    StateSlot,
    TensorSpec,
)
from tests.helpers import PATIENCE_S
from tests.pool import digest, leave_group

STEPS = 4


class Net(nn.Module):
    """Registered in another order than it is used, so that DDP's buckets change when it rebuilds them."""

    def __init__(self) -> None:
        super().__init__()
        self.outer = nn.Linear(700, 5)
        self.middle = nn.Linear(400, 700)
        self.inner = nn.Conv1d(1, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.inner(x[:, None]).flatten(1)
        y: Tensor = self.outer(torch.relu(self.middle(hidden)))
        return y


class Layers(nn.Module):
    """Uses some of its layers, each of which is a bucket of DDP's."""

    def __init__(self, used: str, *, checkpointed: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8, bias=False) for _ in range(3))
        self.used = used
        self._checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for name in self.used:
            layer: nn.Module = getattr(self, name)
            x = checkpoint(layer, x, use_reentrant=True) if self._checkpointed else layer(x)
        return x


class Cube(nn.Module):
    """Has a gradient that depends on its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 4.0))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight.pow(3) * x).sum()


class TwoTypes(nn.Module):
    """Parameters of two types, which no bucket holds together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.b(self.a(x).double())
        return y


class Half(nn.Module):
    """Has gradients in float16 whose sums over two ranks are out of range."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(300, dtype=torch.float16))
        self.mask = nn.Buffer(torch.full((3,), -60_000.0, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).float().sum()


@contextmanager
def group(rank: int, size: int, store: dist.Store) -> Iterator[None]:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60))
    try:
        yield
    finally:
        leave_group()


def batches(rank: int, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """Each rank's own data."""
    for step in range(first, STEPS):
        random = torch.Generator().manual_seed(100 * step + rank)
        yield torch.randn(6, 100, generator=random), torch.randint(5, (6,), generator=random)


def made() -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Net()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def wrapped(model: nn.Module, find_unused: bool = False) -> DistributedDataParallel:
    """In many small buckets, which are not ours."""
    return DistributedDataParallel(model, bucket_cap_mb=0.3, find_unused_parameters=find_unused)


def skipping(used: str, *, static: bool = False, checkpointed: bool = False) -> DistributedDataParallel:
    """Leaves out buckets of which no parameter is used."""
    return DistributedDataParallel(
        Layers(used, checkpointed=checkpointed),
        bucket_cap_mb=1e-5,
        find_unused_parameters=not static,
        static_graph=static,
        skip_all_reduce_unused_params=True,
    )


def ends_of(ddp: DistributedDataParallel, rank: int, **keywords: Any) -> str:
    """Trains for some steps; the parameters then."""
    torch.manual_seed(10 + rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(STEPS):
        optimizer.zero_grad()
        ddp(torch.randn(2, 8, **keywords)).square().mean().backward()
        optimizer.step()
    return digest(dict(ddp.module.named_parameters()))


def loop(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range = range(STEPS)) -> None:
    for step, (x, y) in zip(steps, batches(rank, steps.start), strict=False):
        del step
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def made_before_the_group(rank: int, size: int, store: dist.Store, *, hows: list[str]) -> dict[str, str]:
    """A state that is older than the process group, and a later one."""
    state, hook = farflung.ddp_hook(hows[rank])
    with group(rank, size, store):
        model, optimizer = made()
        ddp = wrapped(model)
        ddp.register_comm_hook(state, hook)
        try:
            loop(ddp, optimizer, rank)
        except FarflungError as error:
            return {"said": str(error)}
        finally:
            state.close()
            del ddp
        return {
            "early": digest(dict(model.named_parameters())),
            "late": hooked(rank, hows[rank])["parameters"],
        }


def in_float16(rank: int, size: int, store: dist.Store) -> dict[str, Any]:
    """Gradients of 40,000 and more by DDP, by its hook and by attach; a buffer inside ``averaged()``."""

    def train(called: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for step in range(STEPS):
            random = torch.Generator().manual_seed(100 * step + rank)
            optimizer.zero_grad()
            called(40_000 + 20_000 * torch.rand(300, generator=random)).backward()
            optimizer.step()

    models = {how: Half() for how in ("ddp", "hook", "attach")}
    optimizers = {how: torch.optim.SGD(model.parameters(), lr=1e-4) for how, model in models.items()}
    with group(rank, size, dist.PrefixStore("group", store)):
        train(DistributedDataParallel(models["ddp"]), optimizers["ddp"])
        ddp = DistributedDataParallel(models["hook"])
        state, hook = farflung.ddp_hook("identity")
        ddp.register_comm_hook(state, hook)
        train(ddp, optimizers["hook"])
        state.close()
    with farflung.attach(models["attach"], optimizers["attach"], "synchronous", store=store) as handle:
        train(models["attach"], optimizers["attach"])
        with handle.use_averaged_model():
            mask = models["attach"].mask.tolist()
    ends = {how: digest(dict(model.named_parameters())) for how, model in models.items()}
    return {**ends, "finite": bool(models["ddp"].weight.isfinite().all()), "mask": mask}


def hooked(rank: int, how: str, find_unused: bool = False, **options: Any) -> dict[str, Any]:
    model, optimizer = made()
    ddp = wrapped(model, find_unused)
    state, hook = farflung.ddp_hook(how, **options)
    ddp.register_comm_hook(state, hook)
    loop(ddp, optimizer, rank)
    result = {"parameters": digest(dict(model.named_parameters())), "bytes": state.sent_nbytes}
    state.close()
    return result


def beside_attach(
    rank: int, size: int, store: dist.Store, *, how: str, recipe: dict[str, Any], **options: Any
) -> dict[str, Any]:
    """The same training by the hook and by attach."""
    model, optimizer = made()
    with group(rank, size, dist.PrefixStore("group", store)):
        theirs = hooked(rank, how, **options)
        with farflung.attach(model, optimizer, Recipe("", "", **recipe, **options), store=store) as handle:
            loop(model, optimizer, rank)
            sent = handle._engine.sent_nbytes
    return {"hook": theirs, "attach": digest(dict(model.named_parameters())), "attach_bytes": sent}


class SlowLearner(Reducer):
    """A mean whose first bucket teaches for as long as the second one is not through."""

    collective = "direct"

    def __init__(self) -> None:
        self._learning: Pending[None] = Pending()
        self._through = threading.Event()

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        del spec, seeds
        return CodecState()

    async def reduce(
        self, channel: Channel, slot: StateSlot, contribution: Contribution, *, step: int
    ) -> ReduceResult:
        del slot, step
        part = channel.get_tag(0).part
        if part > 0:
            await self._learning
        total, side = await channel.get_collective("direct")(
            channel, compute_numerator(channel, contribution), pack_metadata(contribution)
        )
        if part == 1:
            self._through.set()
        return replace(build_result(channel, total, side), update_state=None if part else self._learn)

    def _learn(self, state: CodecState) -> CodecState:
        self._learning.set_result(None)
        if not self._through.wait(PATIENCE_S):
            raise RuntimeError("nothing got through meanwhile")
        return state

    def __repr__(self) -> str:
        return type(self).__name__


def learns_slowly(rank: int, size: int, store: dist.Store, *, how: str) -> str:
    """One step with :class:`SlowLearner`, by the hook or by attach."""
    model, optimizer = made()
    with group(rank, size, dist.PrefixStore("group", store)):
        if how == "attach":
            recipe = Recipe("", "", reducer=SlowLearner(), bucket_nbytes=2000)
            with farflung.attach(model, optimizer, recipe, store=store):
                loop(model, optimizer, rank, range(1))
        else:
            ddp = wrapped(model)
            state, hook = farflung.ddp_hook(SlowLearner(), bucket_nbytes=2000)
            ddp.register_comm_hook(state, hook)
            loop(ddp, optimizer, rank, range(1))
            state.close()
            del ddp
    return digest(dict(model.named_parameters()))


def beside_ddp(rank: int, size: int, store: dist.Store, *, find_unused: bool) -> dict[str, str]:
    """DDP alone, and with a hook that changes nothing."""
    with group(rank, size, store):
        ours = hooked(rank, "identity", find_unused)["parameters"]
        model, optimizer = made()
        ddp = wrapped(model)
        loop(ddp, optimizer, rank)
        del ddp
    return {"ddp": digest(dict(model.named_parameters())), "hook": ours}


MODELS: dict[str, Callable[[], DistributedDataParallel]] = {
    **{f"skips {used}": partial(skipping, used) for used in ("a", "b", "c", "ca")},
    **{f"skips {used}, static": partial(skipping, used, static=True) for used in ("a", "ca")},
    "two types, static": lambda: DistributedDataParallel(TwoTypes(), static_graph=True),
    "checkpoints": lambda: DistributedDataParallel(
        Layers("abc", checkpointed=True), bucket_cap_mb=1e-5, static_graph=True
    ),
}
"""Whose buckets DDP hands over in unusual ways."""


def hooked_beside_ddp(rank: int, size: int, store: dist.Store, *, model: str) -> dict[str, Any]:
    """A model trained by DDP alone, and with a hook that changes nothing; and how many of it were sent in a step."""
    with group(rank, size, store):
        ends = []
        for hooks in (False, True):
            torch.manual_seed(0)
            ddp = MODELS[model]()
            if hooks:
                state, hook = farflung.ddp_hook("identity")
                ddp.register_comm_hook(state, hook)
            ends.append(ends_of(ddp, rank, requires_grad=model == "checkpoints"))
            nbytes = sum(p.nbytes for p in ddp.parameters())
            del ddp
        state.close()
    return {"ddp": ends[0], "hook": ends[1], "models_sent": state.sent_nbytes / nbytes / STEPS}


def joins(
    rank: int, size: int, store: dist.Store, *, how: str, batch_counts: list[int], by_initial: bool
) -> str:
    """The parameters after training on unlike numbers of batches, with our hook or PyTorch's."""
    with group(rank, size, store):
        model, optimizer = made()
        ddp = wrapped(model)
        if how == "allreduce_hook":
            ddp.register_comm_hook(None, allreduce_hook)
        else:
            state, hook = farflung.ddp_hook(how)
            ddp.register_comm_hook(state, hook)
        with ddp.join(divide_by_initial_world_size=by_initial):
            loop(ddp, optimizer, rank, range(batch_counts[rank]))
        if how != "allreduce_hook":
            state.close()
        del ddp
    return digest(dict(model.named_parameters()))


def differentiates_twice(rank: int, size: int, store: dist.Store, *, as_view: bool) -> dict[str, Any]:
    """The gradient of create_graph=True and the gradient of that, with PyTorch's hook and with ours."""
    found = {}
    with group(rank, size, store):
        for how in ("allreduce_hook", "identity"):
            ddp = DistributedDataParallel(Cube(), gradient_as_bucket_view=as_view)
            weight = ddp.module.weight
            state, hook = farflung.ddp_hook("identity")
            ddp.register_comm_hook(*((None, allreduce_hook) if how == "allreduce_hook" else (state, hook)))
            ddp(torch.full((3,), 1.0 + rank)).backward(create_graph=True)
            (second,) = torch.autograd.grad(weight.grad.sum(), weight)
            found[how] = [weight.grad.tolist(), second.tolist()]
            state.close()
            weight.grad = None
            del ddp
    return found


def copied(
    rank: int, size: int, store: dist.Store, *, how: str, folder: str, by_file: bool
) -> dict[str, str]:
    """In one go, and in two with a copy of all between them."""
    path = Path(folder) / f"{rank}.pt"
    with group(rank, size, store):
        whole = hooked(rank, how)["parameters"]
        model, optimizer = made()
        ddp = wrapped(model)
        state, hook = farflung.ddp_hook(how)
        ddp.register_comm_hook(state, hook)
        loop(ddp, optimizer, rank, range(2))
        if by_file:
            state.close()
            torch.save((ddp, state, hook), path)  # noqa: TID251
            again, its_state, hook = torch.load(path, weights_only=False)  # noqa: TID251
        else:
            again, its_state, hook = copy.deepcopy((ddp, state, hook))
            state.close()
        again.register_comm_hook(its_state, hook)
        loop(again, torch.optim.SGD(again.parameters(), lr=0.1), rank, range(2, STEPS))
        its_state.close()
        ends = digest(dict(again.module.named_parameters()))
        del ddp, again
    return {"whole": whole, "copied": ends}


def copied_from_rank_0(rank: int, size: int, store: dist.Store, *, folder: str) -> list[float]:
    """A gradient of zeros, after all ranks have loaded what rank 0 saved when its residual was (0, 1)."""
    path = Path(folder) / "state.pt"
    with group(rank, size, store):
        grads: list[list[float]] = []
        state, hook = farflung.ddp_hook("error_feedback(topk(0.5))")
        for x in (torch.tensor([[3.0, 1.0]]), torch.zeros(1, 2)):
            ddp = DistributedDataParallel(nn.Linear(2, 1, bias=False))
            ddp.register_comm_hook(state, hook)
            ddp(x).sum().backward()
            grads.append(ddp.module.weight.grad[0].tolist())
            state.close()
            if rank == 0:
                torch.save(state, path)  # noqa: TID251
            dist.barrier()
            state = torch.load(path, weights_only=False)  # noqa: TID251
            del ddp
    first, second = grads
    assert first == [3.0, 0.0]
    return second


def telescopes(rank: int, size: int, store: dist.Store, *, how: str) -> dict[str, Any]:
    """What was given, what came and what is left, with parameters that stay; and DDP's buckets in each step."""
    layouts: list[list[tuple[int, ...]]] = []
    with group(rank, size, store):
        model, _ = made()
        ddp = wrapped(model)
        state, hook = farflung.ddp_hook(how)

        def seen(state: HookState, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
            if bucket.index() == 0:
                layouts.append([])
            layouts[-1].append(tuple(p.numel() for p in bucket.parameters()))
            return hook(state, bucket)

        seen.__annotations__.clear()  # DDP compares them with types, and these are text
        ddp.register_comm_hook(state, seen)
        alone, _ = made()
        given, came = ({name: 0.0 for name, _ in model.named_parameters()} for _ in range(2))
        for x, y in batches(rank):
            for module in (alone, ddp):
                module.zero_grad()
                F.cross_entropy(module(x), y).backward()
            for name, p in alone.named_parameters():
                given[name] = given[name] + p.grad  # type: ignore[assignment, operator]
            for name, p in model.named_parameters():
                came[name] = came[name] + p.grad  # type: ignore[assignment, operator]
        left = {}
        names = [name for name, _ in reversed(list(model.named_parameters()))]
        assert state._buckets is not None
        for own in state._buckets:
            local = state._engine.reducer_states[own.index].state.local
            residual = (local if "residual" in local else local["codec"])["residual"]
            for place in own.parameters:
                shape = place.shape
                left[names.pop(0)], residual = (
                    residual[: place.numel()].view(shape),
                    residual[place.numel() :],
                )
        state.close()
        del ddp
    return {"given": given, "came": came, "left": left, "layouts": layouts}


def resumes(rank: int, size: int, store: dist.Store, *, how: str, folder: str) -> dict[str, str]:
    """In one go, and in two with a checkpoint between them."""
    path = Path(folder) / f"{rank}.safetensors"
    with group(rank, size, store):
        whole = hooked(rank, how)["parameters"]
        model, optimizer = made()
        for steps in (range(2), range(2, STEPS)):
            ddp = wrapped(model)
            state, hook = farflung.ddp_hook(how)
            if steps.start:
                state.load_state_dict(load_tree(path))
            ddp.register_comm_hook(state, hook)
            loop(ddp, optimizer, rank, steps)
            save_tree(path, state.state_dict())
            state.close()
            del ddp
    return {"whole": whole, "resumed": digest(dict(model.named_parameters()))}


def falls_back(rank: int, size: int, store: dist.Store, *, faster: int) -> dict[str, Any]:
    """Who carried each step, and what came of it beside DDP alone, where the hook is faster in so many pairs of steps.

    The ranks disagree: rank 0 measures the opposite, less clearly.
    """
    steps, carried = 16, []
    with group(rank, size, store):
        model, optimizer = made()
        ddp = wrapped(model)
        state, hook = farflung.ddp_hook("identity", fall_back_if_slower=True)
        now, reads = 0.0, 0

        def clock() -> float:
            nonlocal now, reads
            hook_wins = reads // 4 < faster  # each step is read twice, in pairs
            reads += 1
            slow = state.is_active != (hook_wins if rank else not hook_wins)
            now += (2.0 if rank else 1.5) if slow else 1.0
            return now

        with mock.patch("farflung.ddp.perf_counter", clock):
            ddp.register_comm_hook(state, hook)
            for step in range(steps):
                loop(ddp, optimizer, rank, range(step % STEPS, step % STEPS + 1))
                carried.append(state.is_active)
        ours = digest(dict(model.named_parameters()))
        sent = state.sent_nbytes
        state.close()
        del ddp
        model, optimizer = made()
        ddp = wrapped(model)
        for step in range(steps):
            loop(ddp, optimizer, rank, range(step % STEPS, step % STEPS + 1))
        del ddp
    model_nbytes = sum(p.nbytes for p in model.parameters())
    return {
        "carried": carried,
        "hook": ours,
        "ddp": digest(dict(model.named_parameters())),
        "models_sent": sent / model_nbytes,
    }


def failure(rank: int, size: int, store: dist.Store, *, kind: str) -> str:
    """What a rank is told when something is wrong."""
    with group(rank, size, store):
        try:
            return FAILURES[kind](rank)
        except (FarflungError, RuntimeError) as error:
            return str(error)


def _unlike(rank: int) -> str:
    state, _ = farflung.ddp_hook("int8" if rank else "topk(0.01)")
    state.close()
    return "nothing was noticed"


def _prepared(how: str) -> tuple[DistributedDataParallel, HookState]:
    model, _ = made()
    ddp = wrapped(model)
    state, hook = farflung.ddp_hook(how)
    ddp.register_comm_hook(state, hook)
    return ddp, state


def _gone(rank: int) -> str:
    ddp, state = _prepared("int8")
    x, y = next(batches(rank))
    try:
        if rank == 0:
            F.cross_entropy(ddp(x), y).backward()
        return ""
    except PeerLost as error:
        return str(error) if error is state.error else "another error"
    finally:
        state.close()


def _closed(rank: int) -> str:
    ddp, state = _prepared("dgc")
    x, y = next(batches(rank))
    F.cross_entropy(ddp(x), y).backward()
    state.close()
    assert state.state_dict()["parameters"]
    F.cross_entropy(ddp(x), y).backward()
    return "nothing was noticed"


def _gone_while_joined(rank: int) -> str:
    ddp, state = _prepared("int8")
    try:
        with ddp.join():
            for x, y in list(batches(rank))[: 1 + rank]:
                F.cross_entropy(ddp(x), y).backward()
                if rank == 1:
                    state.close()
        return "nothing was noticed"
    finally:
        state.close()


def _skips(used: list[str]) -> str:
    """Trains a step with the layers of each text."""
    ddp = skipping("a")
    state, hook = farflung.ddp_hook("identity")
    ddp.register_comm_hook(state, hook)
    try:
        for ddp.module.used in used:
            ddp(torch.ones(2, 8)).sum().backward()
        return "nothing was noticed"
    finally:
        state.close()


def _checkpointed(rank: int) -> str:
    """The backward pass of the last bucket that comes is inside a checkpoint's, and DDP waits there already."""
    del rank
    ddp = skipping("a", static=True, checkpointed=True)
    state, hook = farflung.ddp_hook("identity")
    ddp.register_comm_hook(state, hook)
    try:
        for _ in range(3):
            with mock.patch.object(state._runtime, "sleep_until", return_value=create_completed(None)):
                ddp(torch.ones(2, 8, requires_grad=True)).sum().backward()
        return "nothing was noticed"
    finally:
        state.close()


def _another_model(rank: int) -> str:
    ddp, state = _prepared("error_feedback(topk(0.1))")
    x, y = next(batches(rank))
    try:
        F.cross_entropy(ddp(x), y).backward()
        kept = state.state_dict()
        kept["parameters"]["0"][0] = [3]
        state.load_state_dict(kept)
        return "nothing was noticed"
    finally:
        state.close()


def _two_models(rank: int) -> str:
    ddp, state = _prepared("int8")
    other = wrapped(made()[0])
    other.register_comm_hook(state, exchange)
    x, y = next(batches(rank))
    try:
        for each in (ddp, other):
            F.cross_entropy(each(x), y).backward()
        return "nothing was noticed"
    finally:
        state.close()


def _sparse(rank: int) -> str:
    model = DistributedDataParallel(nn.Embedding(4, 4, sparse=True))
    state, hook = farflung.ddp_hook("int8")
    model.register_comm_hook(state, hook)
    try:
        model(torch.tensor([1])).sum().backward()
        return "nothing was noticed"
    finally:
        state.close()


def _complex(rank: int) -> str:
    class Turned(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self.weight.dtype)).abs()

    model = DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), Turned(3, 3, dtype=torch.complex64)))
    state, hook = farflung.ddp_hook("identity")
    model.register_comm_hook(state, hook)
    try:
        model(torch.ones(2, 3)).sum().backward()
        return "nothing was noticed"
    finally:
        state.close()


def _fsdp(rank: int) -> str:
    from torch.distributed.fsdp import FullyShardedDataParallel

    state, hook = farflung.ddp_hook("int8")
    model = FullyShardedDataParallel(nn.Linear(3, 3), device_id=torch.device("cpu"))
    model.register_comm_hook(state, hook)
    try:
        model(torch.ones(2, 3)).sum().backward()
        return "nothing was noticed"
    finally:
        state.close()


FAILURES: dict[str, Callable[[int], str]] = {
    "unlike": _unlike,
    "gone": _gone,
    "closed": _closed,
    "another model": _another_model,
    "two models": _two_models,
    "sparse": _sparse,
    "complex": _complex,
    "fsdp": _fsdp,
    "gone while joined": _gone_while_joined,
    "unlike at first": lambda rank: _skips(["b" if rank else "a"]),
    "unlike later": lambda rank: _skips(["ab", "ab" if rank else "a"]),
    "used later": lambda rank: _skips(["a", "ab"]),
    "used later on one": lambda rank: _skips(["a", "ab" if rank else "a"]),
    "checkpointed": _checkpointed,
}


def importance(rank: int, size: int, store: dist.Store, *, samples: int, batch_size: int) -> dict[str, Any]:
    """Which samples a rank draws from, how many batches of which it gets, and the parameters that it ends with."""
    with group(rank, size, store):
        data = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
        dataset = torch.utils.data.TensorDataset(data)
        torch.manual_seed(0)
        model = DistributedDataParallel(nn.Linear(3, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sampler = farflung.ImportanceSampler(dataset, batch_size)
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)

        def losses(model: nn.Module, batch: list[Tensor]) -> Tensor:
            found: Tensor = model(batch[0]).square().squeeze(1)
            return found

        drawn_ids: list[int] = []
        batches = 0
        for drawn, batch in sampler.iter_batches(loader, model.module, losses):
            optimizer.zero_grad()
            drawn.reduce_losses(losses(model, batch)).backward()
            optimizer.step()
            drawn_ids += drawn.ids.tolist()
            batches += 1
        parameters = digest(dict(model.module.named_parameters()))
        del model
    return {"share": sampler.share.tolist(), "drawn": drawn_ids, "batches": batches, "parameters": parameters}
