"""Sites of several processes, and the plain replicas that they have to equal, for the pool's workers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from typing_extensions import override

import farflung
from farflung.engine.placement import to_local
from farflung.wall import LaunchEnv
from tests.pool import digest, leave_group

WIDTH, HEADS, WORDS, LENGTH = 16, 4, 37, 8


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + torch.as_tensor(self.down(F.gelu(self.up(self.second_norm(x)))))


class Transformer(nn.Module):
    """A small language model: no shape is a multiple of two shards, and one parameter has a single row."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(torch.randn(LENGTH, WIDTH) / 50)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS)
        self.scale = nn.Parameter(torch.ones(1))

    @override
    def forward(self, ids: Tensor) -> Tensor:
        x = (self.words(ids) + self.places) * self.scale
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(self.norm(x))
        return y.clone()  # FSDP2 warns of views


def draw(step: int, batch: int) -> Tensor:
    """Words of one batch, half of which follow from the others."""
    random = torch.Generator().manual_seed(1000 * step + batch)
    ids = torch.randint(WORDS, (4, LENGTH + 1), generator=random)
    ids[:, 1::2] = (ids[:, 0:-1:2] * 7 + 3) % WORDS
    return ids


def loss_of(model: nn.Module, step: int, batch: int) -> Tensor:
    ids = draw(step, batch)
    logits: Tensor = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten())


def whole(model: nn.Module) -> str:
    """A hash of all parameters, of which a site's processes have parts."""
    tensors = {}
    for name, p in model.named_parameters():
        tensors[name.replace("_checkpoint_wrapped_module.", "")] = (
            p.full_tensor() if hasattr(p, "full_tensor") else p
        )
    return digest(tensors)


def lay_out(model: Transformer, layout: str, mesh: DeviceMesh, options: dict[str, Any]) -> None:
    """Shards a model over a mesh of a site."""
    if "tp" in layout:
        for block in model.blocks:
            parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    if "fsdp" in layout:
        for block in model.blocks:
            fully_shard(block, mesh=mesh["shard"], **options)
        fully_shard(model, mesh=mesh["shard"], **options)


OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "mixed": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@contextlib.contextmanager
def site_of(rank: int, size: int, store: dist.Store, per_site: int, tp: int) -> Iterator[DeviceMesh]:
    """The mesh of a site, in a process group of its own, as a torchrun of its own would make it."""
    site, share = divmod(rank, per_site)
    dist.init_process_group(
        store=dist.PrefixStore(f"site-{site}", store), rank=share, world_size=per_site, backend="gloo"
    )
    try:
        yield init_device_mesh("cpu", (per_site // tp, tp), mesh_dim_names=("shard", "tp"))
    finally:
        leave_group()


def train(
    rank: int,
    size: int,
    store: dist.Store,
    *,
    layout: str,
    recipe: str,
    port: int,
    steps: int = 6,
    per_site: int = 2,
    optimizer: str = "SGD",
    policy: str = "",
    **loop: Any,
) -> dict[str, Any]:
    """Trains as a process of a site, or as the plain replica that computes the batches of such a site."""
    torch.manual_seed(rank if layout in ("plain", "copies") else rank // per_site)  # those of the first count
    if layout == "plain":
        env = LaunchEnv(rank, size, rank, size)
        return follow(
            Transformer(), optimizer, recipe, steps, batches=per_site, launch_env=env, store=store, **loop
        )
    os.environ["FARFLUNG_SITE"] = f"{rank // per_site}/{size // per_site}@127.0.0.1:{port}"
    tp = 2 if "tp" in layout else 1
    with site_of(rank, size, store, per_site, tp) as mesh:
        model = Transformer()
        lay_out(model, layout, mesh, OPTIONS[policy])
        number = rank % per_site // tp
        return follow(model, optimizer, recipe, steps, number=number, site=mesh, **loop)


def follow(
    model: nn.Module,
    optimizer: str,
    recipe: str,
    steps: int,
    *,
    batches: int = 1,
    number: int = 0,
    clip: float = 0.0,
    **options: Any,
) -> dict[str, Any]:
    """A loop of one's own; a plain replica accumulates the gradients of a site's batches."""
    rates = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 1e-3}}
    stepping = getattr(torch.optim, optimizer)(model.parameters(), **rates[optimizer])
    losses = []
    with farflung.attach(model, stepping, recipe, seed=3, deadline_s=20, **options) as handle:
        for step in range(steps):
            with handle.no_sync() if batches > 1 else contextlib.nullcontext():
                for other in range(batches - 1):
                    (loss_of(model, step, 10 * handle.rank + other) / batches).backward()
            loss = loss_of(model, step, 10 * handle.rank + number + batches - 1)
            (loss / batches).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            stepping.step()
            stepping.zero_grad()
            losses.append(loss.item())
    return {"bits": whole(model), "losses": losses, "sent": handle.sent_nbytes, "local": local_bits(model)}


def local_bits(model: nn.Module) -> str:
    """A hash of what this process holds."""
    return digest({name: to_local(p) for name, p in model.named_parameters()})
