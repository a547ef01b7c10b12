"""Sites of several processes, and the plain replicas that they have to equal, for the pool's workers."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict_loader as loading
import torch.distributed.checkpoint.state_dict_saver as saving
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from typing_extensions import override

import farflung
import farflung.recipes
from farflung.engine.placement import to_local
from farflung.engine.times import StepTimer
from farflung.errors import CheckpointError, ConfigError, NonFinite, ProtocolError, RunLost
from farflung.schedules import delayed
from farflung.wall import LaunchEnv
from tests.pool import digest, leave_group

HEADS, WORDS, LENGTH = 4, 37, 8


class Block(nn.Module):
    """Attention and a perceptron."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    @override
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + torch.as_tensor(self.down(F.gelu(self.up(self.second_norm(x)))))


class Transformer(nn.Module):
    """A small language model; some parameters have an odd number of rows, and one has a single element."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Parameter(torch.randn(LENGTH, width) / 50)
        self.blocks = nn.ModuleList([Block(width)])
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, WORDS)
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
    if "fsdp" in layout or "hsdp" in layout:
        part = mesh["tp", "shard"] if "hsdp" in layout else mesh["shard"]
        for block in model.blocks:
            fully_shard(block, mesh=part, **options)
        fully_shard(model, mesh=part, **options)


POLICIES: dict[str, dict[str, Any]] = {
    "": {},
    "mixed precision": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
}


@contextlib.contextmanager
def group_of(site: int, share: int, per_site: int, store: dist.Store) -> Iterator[None]:
    """The process group of a site, as a torchrun of its own would make it."""
    dist.init_process_group(
        store=dist.PrefixStore(f"site-{site}", store), rank=share, world_size=per_site, backend="gloo"
    )
    try:
        yield
    finally:
        leave_group()


def train(
    rank: int,
    size: int,
    store: dist.Store,
    *,
    cases: list[dict[str, Any]],
    port: int = 0,
    per_site: int = 2,
    times: Sequence[float] = (),
) -> list[dict[str, Any]]:
    """Trains once for each case, as a process of a site.

    Args:
      rank: among the processes of all sites.
      size: how many these are.
      store: where they meet if they have one launcher.
      cases: what each is trained by.
      port: where the sites meet; 0: one launcher has started them all.
      per_site: processes of a site.
      times: seconds of an exchange that each process of a site says it has measured, for a delay chosen by time.
    """
    site, share = divmod(rank, per_site)
    options: dict[str, Any] = {}
    if port:
        os.environ["FARFLUNG_SITE"] = f"{site}/{size // per_site}@127.0.0.1:{port}"
    with group_of(site, share, per_site, store), contextlib.ExitStack() as patches:
        if times:
            measured = {"elapsed_s": 0.0, "step_s": 1.0, "exchange_s": times[share]}
            patches.enter_context(mock.patch.object(StepTimer, "to_json", return_value=measured))
            patches.enter_context(mock.patch.object(delayed, "FIRST_CHOICE", 1))
        results = []
        for number, case in enumerate(cases):
            if not port:
                options["launch_env"] = LaunchEnv(rank, size, rank, size)
                options["store"] = dist.PrefixStore(f"case-{number}", store)
            results.append(train_once(site, share, per_site, **case, **options))
        return results


def train_once(
    site: int, share: int, per_site: int, *, layout: str, policy: str = "", width: int = 16, **loop: Any
) -> dict[str, Any]:
    """Trains a model that this site holds, from parameters of its own; returns the error of one that stops."""
    tp = 2 if "tp" in layout or "hsdp" in layout else 1
    mesh = init_device_mesh("cpu", (per_site // tp, tp), mesh_dim_names=("shard", "tp"))
    torch.manual_seed(10 * site + (share if layout == "copies" else 0))
    model = Transformer(width)
    if "checkpoint" in layout:
        model.blocks = nn.ModuleList(map(checkpoint_wrapper, model.blocks))
    lay_out(model, layout, mesh, POLICIES[policy])
    batch = share // 2 if "tp" in layout else share
    try:
        return follow(model, batches=[batch], share=share, site=mesh, **loop)
    except NonFinite as error:
        return {"error": str(error)}


def train_plain(
    rank: int, size: int, store: dist.Store, *, cases: list[dict[str, Any]], per_site: int = 2
) -> list[dict[str, Any]]:
    """Trains as the plain replica that computes the batches of a site's processes one after the other."""
    env = LaunchEnv(rank, size, rank, size)
    results = []
    for number, case in enumerate(cases):
        torch.manual_seed(10 * rank)
        own, options = dist.PrefixStore(str(number), store), dict(case)
        model = Transformer(options.pop("width", 16))
        results.append(follow(model, batches=range(per_site), launch_env=env, store=own, **options))
    return results


RATES = {"SGD": {"lr": 0.1, "momentum": 0.9}, "AdamW": {"lr": 1e-3}}


def follow(
    model: Any,
    recipe: str,
    *,
    batches: Sequence[int],
    share: int = -1,
    weights: Sequence[Sequence[float]] = (),
    steps: int = 6,
    optimizer: str = "SGD",
    clip: float = 0.0,
    passes: int = 1,
    switch: str = "",
    poison: tuple[int, int] = (-1, -1),
    evaluate: int = -1,
    is_uneven: bool = False,
    **options: Any,
) -> dict[str, Any]:
    """A loop of one's own.

    Args:
      model: what is trained.
      recipe: how.
      batches: those of this process among the batches of its site; it accumulates their gradients.
      share: the number of this process in its site; a plain replica stands for all.
      weights: that each process of each site gives.
      steps: of the optimizer.
      optimizer: a class of torch's.
      clip: the norm to which gradients are clipped; 0: they are not.
      passes: backward passes of each batch, without exchanges but the last.
      switch: who is told of that: farflung, FSDP2, or nobody.
      poison: a step and a site where one row of a gradient becomes NaN.
      evaluate: the step after which the averaged model is looked at.
      is_uneven: whether site 1 has a batch less than site 0.
      options: of attach.
    """
    stepping = getattr(torch.optim, optimizer)(model.parameters(), **RATES[optimizer])
    losses, norms, evaluated = [], [], 0.0
    with contextlib.ExitStack() as stack:
        handle = stack.enter_context(
            farflung.attach(model, stepping, recipe, seed=3, deadline_s=20, **options)
        )
        if weights:
            own = weights[handle.rank]
            handle.set_weight(sum(own) / len(own) if share < 0 else own[share])
        if is_uneven:
            stack.enter_context(handle.join())
        for step in range(steps - is_uneven * handle.rank):
            work = [(batch, turn) for batch in batches for turn in range(passes)]
            for batch, turn in work:
                is_last = (batch, turn) == work[-1]
                if switch == "FSDP2":
                    model.set_requires_gradient_sync(is_last)
                with contextlib.nullcontext() if is_last or switch == "FSDP2" else handle.no_sync():
                    loss = loss_of(model, step * passes + turn, 10 * handle.rank + batch) / passes
                    if poison == (step, handle.rank):
                        loss = loss + 0 * poisoned(model.head.bias)
                    (loss / len(batches)).backward()
            if clip:
                norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), clip)))
            stepping.step()
            stepping.zero_grad()
            losses.append(loss.item())
            if evaluate == step:
                with handle.use_averaged_model() as averaged, torch.no_grad():
                    evaluated = loss_of(averaged, 99, 0).item()
        counts = handle.rank, handle.size, handle.share, handle.members
    return {
        "bits": whole(model),
        "local": digest({name: to_local(p) for name, p in model.named_parameters()}),
        "sent": handle.sent_nbytes,
        "counts": counts,
        "losses": losses,
        "norms": norms,
        "evaluated": evaluated,
    }


def poisoned(bias: Tensor) -> Tensor:
    """The first element of a parameter, whose gradient becomes NaN and that of the others does not."""
    first = bias[:1] * 1
    if first.requires_grad:
        first.register_hook(lambda grad: grad * torch.nan)
    return first.sum()


def lose(rank: int, sites: int, ports: list[int], recipe: str, victim: int, **options: Any) -> None:
    """Trains as one of two processes of a site, of which the victim ends at step 3; prints how this process ends."""
    site, share = divmod(rank, 2)
    torch.set_num_threads(1)
    os.environ["FARFLUNG_SITE"] = f"{site}/{sites}@127.0.0.1:{ports[sites]}"
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[site]}", rank=share, world_size=2)
    torch.manual_seed(site)
    model = Transformer()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp"))
    lay_out(model, "fsdp", mesh, {})
    stepping = torch.optim.AdamW(model.parameters(), lr=1e-3)
    members = []
    try:
        with farflung.attach(model, stepping, recipe, site=mesh, deadline_s=10, **options) as handle:
            while handle.step < 12 and (handle.step < 6 or handle.size == sites):
                if rank == victim and handle.step == 3:
                    os._exit(7)
                members.append(handle.members)
                loss_of(model, handle.step, handle.rank).backward()
                stepping.step()
                stepping.zero_grad()
    except Exception as error:
        print(json.dumps({"error": type(error).__name__, "text": str(error)}))
        os._exit(1)  # gloo may wait for the victim
    print(json.dumps({"bits": whole(model), "members": members}))
    dist.destroy_process_group()


def resume(rank: int, size: int, store: dist.Store, *, recipe: str, port: int, folder: str) -> dict[str, Any]:
    """Trains 8 steps at once; and 4, saved by torch's distributed checkpoint inside the site, then 4 from that."""
    site, share = divmod(rank, 2)
    os.environ["FARFLUNG_SITE"] = f"{site}/{size // 2}@127.0.0.1:{port}"
    place, ends = Path(folder, f"site-{site}"), []
    states: list[dict[str, Any]] = []
    with group_of(site, share, 2, store):
        for first, last in ((0, 8), (0, 4), (4, 8)):
            torch.manual_seed(site + 10 * first)
            model, mesh = Transformer(), init_device_mesh("cpu", (2, 1), mesh_dim_names=("shard", "tp"))
            lay_out(model, "fsdp", mesh, {})
            stepping = torch.optim.AdamW(model.parameters(), lr=1e-2)
            with farflung.attach(model, stepping, recipe, seed=3, deadline_s=20, site=mesh) as handle:
                if first:
                    model_state, optimizer_state = get_state_dict(model, stepping)
                    loading.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=place)
                    set_state_dict(
                        model, stepping, model_state_dict=model_state, optim_state_dict=optimizer_state
                    )
                    handle.load_state_dict(states[-1])
                for step in range(handle.step, last):
                    loss_of(model, step, rank).backward()
                    stepping.step()
                    stepping.zero_grad()
                with handle.use_averaged_model() as averaged, torch.no_grad():
                    loss_of(averaged, 99, 0)  # which leaves the root gathered
                if last == 4:
                    model_state, optimizer_state = get_state_dict(model, stepping)
                    saving.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=place)
                    states.append(copy.deepcopy(handle.state_dict()))
                ends.append(
                    (digest({name: to_local(p) for name, p in model.named_parameters()}), handle.step)
                )
    refusal = ""
    try:
        handle.load_state_dict({**states[0], "share": [share, 4]})
    except CheckpointError as error:
        refusal = str(error)
    return {"ends": ends, "refusal": refusal}


class Branched(nn.Module):
    """A body, and heads of which a batch uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 5)
        self.heads = nn.ModuleList(nn.Linear(5, 1) for _ in range(3))

    @override
    def forward(self, x: Tensor, head: int) -> Tensor:
        y: Tensor = self.heads[head](torch.relu(self.body(x)))
        return y.square().mean()


def branch(
    rank: int, size: int, store: dist.Store, *, layout: str, port: int, recipe: str, per_site: int = 2
) -> tuple[str, bool, int]:
    """Each process of a site uses another head, and nobody the last: returns its end, if that one is as it was, and how
    many rounds of exchanges there were.
    """
    site, share = divmod(rank, per_site)
    if layout == "plain":
        return follow_branches(
            site, range(2), recipe, launch_env=LaunchEnv(rank, size, rank, size), store=store
        )
    os.environ["FARFLUNG_SITE"] = f"{site}/{size // per_site}@127.0.0.1:{port}"
    with group_of(site, share, per_site, store):
        return follow_branches(site, [share], recipe, shards_body=layout == "body", site=dist.group.WORLD)


def follow_branches(
    number: int, heads: Sequence[int], recipe: str, *, shards_body: bool = False, **options: Any
) -> tuple[str, bool, int]:
    torch.manual_seed(number)
    model: Any = Branched()
    if shards_body:
        fully_shard(model.body)
    stepping = torch.optim.AdamW(model.parameters(), lr=1e-2)
    own = dataclasses.replace(
        farflung.recipes.parse_recipe(recipe), bucket_nbytes=16
    )  # each parameter its bucket
    with warnings.catch_warnings(), farflung.attach(model, stepping, own, deadline_s=20, **options) as handle:
        warnings.simplefilter("ignore")  # of parameters without a part in the loss
        first = model.heads[2].weight.detach().clone()
        for step in range(5):
            for head in heads:
                x = torch.randn(
                    4, 6, generator=torch.Generator().manual_seed(100 * step + 10 * number + head)
                )
                with handle.no_sync() if head != heads[-1] else contextlib.nullcontext():
                    (model(x, head) / len(heads)).backward()
            stepping.step()
            stepping.zero_grad()
        rounds = handle._engine.round_number
    return whole(model), torch.equal(first, model.heads[2].weight), rounds


def refuse(rank: int, size: int, store: dist.Store, *, port: int) -> dict[str, str]:
    """What attach says in one process of two sites of two, which have one process group."""
    messages: dict[str, str] = {}
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    site, share = divmod(rank, 2)
    both = init_device_mesh("cpu", (2, 2), mesh_dim_names=("sites", "shard"))
    env = LaunchEnv(rank, size, rank, size)

    def refused(name: str, model: nn.Module, recipe: str = "synchronous", **options: Any) -> None:
        stepping = torch.optim.SGD(model.parameters(), lr=0.1)
        try:
            farflung.attach(model, stepping, recipe, **options)
        except (ConfigError, ProtocolError, RunLost) as error:
            messages[name] = f"{type(error).__name__}: {error}"

    def sharded(mesh: DeviceMesh = both["shard"]) -> Any:
        return fully_shard(nn.Linear(4, 3), mesh=mesh)

    place: dict[str, Any] = {"site": both["shard"], "launch_env": env}
    refused("no site", sharded())
    refused("FSDP1", FullyShardedDataParallel(nn.Linear(4, 3), device_id=torch.device("cpu")), **place)
    refused("both sites", sharded(both["sites"]), **place)
    refused(
        "another's",
        nn.Linear(4, 3),
        site=dist.new_group([2 * (1 - site), 2 * (1 - site) + 1]),
        launch_env=env,
    )
    refused("quorum", sharded(), elastic=1, quorum="1", **place)
    refused("unnumbered", sharded(), site=both["shard"], launch_env=LaunchEnv(share, 3, 0, 3))
    refused("unlike", nn.Linear(4, 3 + share), **place)
    os.environ["FARFLUNG_SITE"] = f"{site}/2@127.0.0.1:{port}"
    refused("told alone", nn.Linear(4, 3))
    with mock.patch("farflung.handle._CONNECT_TIMEOUT_S", 8.0):
        # Site 1 has one process of the two.
        group = dist.new_group([0, 1]) if site == 0 else None
        alone = dist.new_group([2], use_local_synchronization=True) if rank == 2 else None
        if (own := group or alone) is not None:
            refused("of unlike sizes", nn.Linear(4, 3), site=own)
    leave_group()
    return messages
