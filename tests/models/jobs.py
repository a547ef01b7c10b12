"""Two replicas train a model of :mod:`tests.models.architectures`, as jobs of the pool's workers."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import farflung
from farflung.handle import Handle
from farflung.wall import LaunchEnv
from tests.ddp_jobs import group
from tests.models.architectures import ARCHITECTURES, Architecture
from tests.pool import digest

Optimizer = torch.optim.Optimizer


def equals_ddp(rank: int, size: int, store: dist.Store, *, name: str) -> dict[str, Any]:
    """Returns digests of the parameters after three steps under DDP, under farflung's hook and under attach."""
    architecture = ARCHITECTURES[name]
    ends = {}
    with group(rank, size, dist.PrefixStore("ddp", store)):
        for how in ("ddp", "hook"):
            model, optimizer = _make(architecture, rank)
            ddp = DistributedDataParallel(model, find_unused_parameters=architecture.has_unused)
            if how == "hook":
                state, hook = farflung.ddp_hook("identity")
                ddp.register_comm_hook(state, hook)
            _train(architecture, ddp, optimizer, rank, range(3))
            ends[how] = digest(dict(model.named_parameters()))
            del ddp
        state.close()
    model, optimizer = _make(architecture, rank)
    with _attach(model, optimizer, "synchronous", rank, size, store):
        _train(architecture, model, optimizer, rank, range(3))
    ends["attach"] = digest(dict(model.named_parameters()))
    return {**ends, "tensors": len(_tensors(model))}


def averages(rank: int, size: int, store: dist.Store, *, name: str, how: str) -> dict[str, Any]:
    """Trains four steps and returns what ``averaged()`` and ``finish()`` make of the model.

    Returns:
      Digests of the parameters inside and at the end, names of tensors that changed without need inside, names of
      those that did not come back, and the statistics that have moved: this replica's, and those inside.
    """
    architecture = ARCHITECTURES[name]
    model, optimizer = _make(architecture, rank)
    with _attach(model, optimizer, how, rank, size, store) as handle:
        start = _copy(_tensors(model))
        _train(architecture, model, optimizer, rank, range(4))
        own = _copy(_tensors(model))
        frozen = {key for key, p in model.named_parameters() if not p.requires_grad}
        buffers = dict(model.named_buffers())
        moved = {
            key for key in buffers if not torch.equal(own[key], start[key]) and own[key].is_floating_point()
        }
        with handle.use_averaged_model():
            inside = _copy(_tensors(model))
            parameters = digest(dict(model.named_parameters()))
        restored = _copy(_tensors(model))
    return {
        "inside": parameters,
        "end": digest(dict(model.named_parameters())),
        "changed": _different(own, inside, frozen | buffers.keys() - moved),
        "lost": _different(own, restored, own),
        "own statistics": [own[key] for key in sorted(moved)],
        "mean statistics": [inside[key] for key in sorted(moved)],
    }


def resumes(rank: int, size: int, store: dist.Store, *, name: str, how: str) -> tuple[str, str]:
    """Returns digests of the parameters after training that a checkpoint does not interrupt, and does."""
    architecture = ARCHITECTURES[name]
    model, optimizer = _make(architecture, rank)
    kept = io.BytesIO()
    with _attach(model, optimizer, how, rank, size, dist.PrefixStore("whole", store)) as handle:
        _train(architecture, model, optimizer, rank, range(3))
        torch.save((model.state_dict(), optimizer.state_dict(), handle.state_dict()), kept)  # noqa: TID251
        _train(architecture, model, optimizer, rank, range(3, 5))
    whole = digest(_tensors(model))
    kept.seek(0)
    states = torch.load(kept, weights_only=True)  # noqa: TID251
    model, optimizer = _make(architecture, rank + size)
    with _attach(model, optimizer, how, rank, size, dist.PrefixStore("resumed", store)) as handle:
        model.load_state_dict(states[0])
        optimizer.load_state_dict(states[1])
        handle.load_state_dict(states[2])
        _train(architecture, model, optimizer, rank, range(3, 5))
    return whole, digest(_tensors(model))


def _make(architecture: Architecture, seed: int) -> tuple[nn.Module, Optimizer]:
    """Makes a model that differs between ranks, as all start as rank 0."""
    torch.manual_seed(seed)
    model = architecture.build()
    trained = [p for p in model.parameters() if p.requires_grad]
    return model, torch.optim.SGD(trained, lr=0.01, momentum=0.5)


def _attach(
    model: nn.Module, optimizer: Optimizer, how: str, rank: int, size: int, store: dist.Store
) -> Handle:
    return farflung.attach(model, optimizer, how, launch_env=LaunchEnv(rank, size, rank, size), store=store)


def _train(
    architecture: Architecture, model: nn.Module, optimizer: Optimizer, rank: int, steps: Iterable[int]
) -> None:
    for step in steps:
        torch.manual_seed(2 * step + rank)  # for dropout
        optimizer.zero_grad()
        architecture.loss(model, torch.Generator().manual_seed(2 * step + rank)).backward()
        optimizer.step()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _different(one: dict[str, Tensor], other: dict[str, Tensor], names: Iterable[str]) -> list[str]:
    return [name for name in sorted(names) if not torch.equal(one[name], other[name])]
