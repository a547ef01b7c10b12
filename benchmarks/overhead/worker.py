"""Times farflung against DistributedDataParallel, or our all-reduce against gloo's, in turn in the same processes."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import farflung
from benchmarks.common.meter import MAIN, ROLES, WAKES, Memory, Meter
from farflung.comm import Endpoint, ExchangeChannel
from farflung.comm.interface import find_local_address
from farflung.config import Training
from farflung.recipes import parse_recipe
from farflung.runs import make_replica, resolve_run_collective
from farflung.seeding import create_generator
from farflung.telemetry import JsonLinesSink, Telemetry
from farflung.wall import WallRuntime
from farflung.workloads import create_workload

BATCH = 32
TOKENS = 64
WARM_UP = 8
"""Steps of GPT-2 before what is held is read."""
PROFILED = 3
"""Blocks of each, behind those that count, that say where the milliseconds go."""


def main() -> None:
    """``worker what rounds shorter``, the last by how much blocks are shorter; rank 0 prints one JSON object."""
    torch.set_num_threads(1)
    what, (rounds, shorter) = sys.argv[1], map(int, sys.argv[2:4])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    store, _, _ = next(iter(rendezvous("env://")))
    dist.init_process_group("gloo", store=dist.PrefixStore("gloo", store), rank=rank, world_size=size)
    meter = Meter()
    kind, _, detail = what.partition(":")
    kinds = {"attach": attach, "gpt2": gpt2, "train": train, "all_reduce": all_reduce}
    sides = kinds[kind](detail, rank, size, store)
    theirs, ours = sides.theirs, sides.ours
    count = max(1, sides.block // shorter)
    timed(theirs, count, meter)
    timed(ours, count, meter)
    pairs = []
    for round_ in range(rounds):
        # Taking turns in going first evens out a drift of the machine.
        if round_ % 2:
            own = timed(ours, count, meter)
            pairs.append((timed(theirs, count, meter), own))
        else:
            other = timed(theirs, count, meter)
            pairs.append((other, timed(ours, count, meter)))
    with meter.stopwatch():
        profiled = [(timed(theirs, count, meter), timed(ours, count, meter)) for _ in range(PROFILED)]
    sides.close()
    of_all = torch.tensor([[own.processor_ms, own.wakes, other.processor_ms] for other, own in pairs])
    dist.all_reduce(of_all)
    if rank == 0:
        ratios = [own.wall_s / other.wall_s for other, own in pairs]
        quartiles = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else [ratios[0]] * 3
        said = {
            "ratio": statistics.median(ratios),
            "spread": [quartiles[0], quartiles[2]],
            "cpu_ratio": statistics.median(own.processor_ms / other.processor_ms for other, own in pairs),
            "cpu_ratio_of_all": float((of_all[:, 0] / of_all[:, 2]).median()),
            "wakes": float(of_all[:, 1].median()) / size,
            "wall_s": statistics.median(own.wall_s for _, own in pairs),
            "theirs": profile([other for other, _ in profiled]),
            "ours": profile([own for _, own in profiled]),
            **sides.said,
        }
        print(json.dumps(said), flush=True)
    dist.destroy_process_group()  # its threads may not outlive the interpreter


@dataclass(frozen=True)
class Timed:
    """One repetition of what is timed, on average of a block.

    Args:
      wall_s: on the clock.
      spent: in the words of :class:`benchmarks.common.meter.Meter`.
    """

    wall_s: float
    spent: Mapping[str, float]

    @property
    def processor_ms(self) -> float:
        """Of all threads."""
        return sum(self.spent.get(role, 0.0) for role in ROLES)

    @property
    def wakes(self) -> float:
        """Of the communication thread."""
        return self.spent.get(WAKES, 0.0)


def timed(run: Callable[[int], object], count: int, meter: Meter) -> Timed:
    """Runs a block of so many, once all are there."""
    dist.barrier()
    before, wall = meter.read(), time.perf_counter()
    run(count)
    dist.barrier()
    wall_s = time.perf_counter() - wall
    return Timed(wall_s / count, {name: spent / count for name, spent in meter.since(before).items()})


def profile(blocks: Sequence[Timed]) -> dict[str, float]:
    """Where the milliseconds go, each the median of the blocks; what the main thread does not compute, it waits."""
    names = sorted({name for block in blocks for name in block.spent})
    found = {name: statistics.median(block.spent.get(name, 0.0) for block in blocks) for name in names}
    wall_ms = 1e3 * statistics.median(block.wall_s for block in blocks)
    waiting_ms = statistics.median(1e3 * block.wall_s - block.spent[MAIN] for block in blocks)
    said = {"wall": wall_ms, "main thread waiting": waiting_ms, **found}
    return {name: round(spent, 3) for name, spent in said.items() if spent}


@dataclass(frozen=True)
class Sides:
    """What is timed in turn.

    Args:
      theirs: does it so many times.
      ours: the same.
      close: ends it all.
      block: how many times a block is.
      said: what was measured before.
    """

    theirs: Callable[[int], object]
    ours: Callable[[int], object]
    close: Callable[[], None]
    block: int
    said: Mapping[str, float] = field(default_factory=dict)


def create_endpoint(option: str) -> Endpoint:
    """Returns that of loopback, or with ``lab`` that of the lab."""
    if option == "lab":
        return Endpoint(find_local_address(os.environ["MASTER_ADDR"]))
    return Endpoint(encrypt=option == "encrypted")


def attach(detail: str, rank: int, size: int, store: dist.Store) -> Sides:
    """The same loop around both.

    Args:
      detail: ``mlp``, ``tensors``, ``resnet20``, or ``resnet8`` on small pictures, with ``+encrypted`` or ``+lab``
        behind it.
      rank: of this process.
      size: how many there are.
      store: of the run.
    """
    name, _, option = detail.partition("+")
    shape = {"mlp": (784,), "tensors": (1000,), "resnet8": (3, 16, 16)}.get(name, (3, 32, 32))

    def made() -> nn.Module:
        if name == "mlp":
            torch.manual_seed(0)
            return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
        if name == "tensors":
            return ManyTensors()
        return create_workload(f"cifar10/{name}").build_model(create_generator(0, "model"))

    inputs = torch.randn(BATCH, *shape)
    targets = torch.randint(10, (BATCH,))

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            loss = F.cross_entropy(model(inputs), targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    their_model = DistributedDataParallel(made())
    their_optimizer = torch.optim.SGD(their_model.parameters(), lr=0.01, momentum=0.9)
    our_model = made()
    our_optimizer = torch.optim.SGD(our_model.parameters(), lr=0.01, momentum=0.9)
    handle = farflung.attach(our_model, our_optimizer, endpoint=create_endpoint(option))
    return Sides(
        partial(loop, their_model, their_optimizer),
        partial(loop, our_model, our_optimizer),
        handle.finish,
        60 if name == "mlp" else 8,
    )


class ManyTensors(nn.Module):
    """Linear layer whose 1,000 outputs have a parameter tensor of 1,000 numbers each."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList([nn.Parameter(torch.zeros(1000)) for _ in range(1000)])

    def forward(self, inputs: Tensor) -> Tensor:
        """Returns the outputs of a batch."""
        return torch.stack([inputs[0] @ row for row in self.rows]).expand(len(inputs), -1)


def gpt2(detail: str, rank: int, size: int, store: dist.Store) -> Sides:
    """The same loop around both; ``detail`` is a recipe, with ``small:`` before it for a model of two layers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    how = detail.removeprefix("small:")
    config = GPT2Config(resid_pdrop=0.0, attn_pdrop=0.0, embd_pdrop=0.0)
    if how != detail:
        config.update({"n_layer": 2, "n_embd": 96, "vocab_size": 1000})
    tokens = torch.randint(config.vocab_size, (1, TOKENS))

    def loop(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
        for _ in range(count):
            model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    torch.manual_seed(rank)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    nbytes = sum(p.nbytes for p in model.parameters())
    dist.barrier()
    with Memory() as attaching:
        begin = time.perf_counter()
        handle = farflung.attach(model, optimizer, how, deadline_s=300)
        seconds = time.perf_counter() - begin
    ours = partial(loop, model, optimizer)
    ours(WARM_UP)
    held_nbytes = attaching.grown_nbytes()
    their_model = DistributedDataParallel(GPT2LMHeadModel(config))
    theirs = partial(loop, their_model, torch.optim.SGD(their_model.parameters(), lr=1e-4))
    return Sides(
        theirs,
        ours,
        handle.finish,
        4,
        {
            "attach_s": seconds,
            "attach_models": attaching.most_nbytes / nbytes,
            "held_models": held_nbytes / nbytes,
        },
    )


def train(detail: str, rank: int, size: int, store: dist.Store) -> Sides:
    """The whole replica loop, telemetry written, against a DDP loop that reads the same data."""
    work = create_workload(detail)
    training = Training.resolve(work.defaults, {"batch_size": BATCH, "steps": 10**9})
    runtime = WallRuntime(rank, size, store)
    folder = tempfile.TemporaryDirectory()
    telemetry = Telemetry(rank, JsonLinesSink(Path(folder.name) / "t.jsonl"))
    replica = make_replica(runtime, work, parse_recipe("synchronous"), training, telemetry)
    resolve_run_collective(runtime.resolve_collective, parse_recipe("synchronous"), replica)
    data, _ = work.load_datasets()
    model = DistributedDataParallel(work.build_model(create_generator(0, "model")))
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=training.learning_rate,
        momentum=training.momentum,
        weight_decay=training.weight_decay,
    )
    random = torch.Generator().manual_seed(rank)
    order = torch.randperm(len(data), generator=random).split(BATCH)
    at = [0]

    def theirs(count: int) -> None:
        for _ in range(count):
            batch = data.take(order[at[0] % (len(order) - 1)], train=True)
            at[0] += 1
            work.compute_losses(model, batch).mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    async def steps(count: int) -> None:
        for _ in range(count):
            await replica.step()

    def close() -> None:
        runtime.close()
        folder.cleanup()

    return Sides(theirs, lambda count: runtime.run(steps(count)), close, 8)


def all_reduce(detail: str, rank: int, size: int, store: dist.Store) -> Sides:
    """gloo's all-reduce against ours; ``detail`` is ``collective:bytes``, with ``+encrypted`` or ``+lab`` behind it."""
    detail, _, option = detail.partition("+")
    name, _, nbytes = detail.partition(":")
    runtime = WallRuntime(rank, size, store, endpoint=create_endpoint(option))
    tensor = torch.ones(int(nbytes) // 4)
    side = torch.ones(1, dtype=torch.float64)
    exchange = [0]

    def theirs(count: int) -> None:
        for _ in range(count):
            dist.all_reduce(tensor)
        tensor.fill_(1)

    async def one() -> Tensor:
        exchange[0] += 1
        channel = ExchangeChannel(runtime.comm, exchange[0], 0)
        return (await channel.get_collective(name)(channel, tensor, side))[0]

    def ours(count: int) -> None:
        for _ in range(count):
            runtime.launch(one()).wait()
        tensor.fill_(1)

    return Sides(theirs, ours, runtime.close, 100 if int(nbytes) < 1 << 20 else 3)


if __name__ == "__main__":
    main()
