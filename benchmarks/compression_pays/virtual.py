"""Step times in virtual time: real arithmetic and real payloads, a modelled clock, and processor time as measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from farflung.comm import ExchangeChannel
from farflung.network import NetworkProfile
from farflung.replica.buckets import Filling, fillings
from farflung.runtime import VirtualWorld
from farflung.seeding import generator
from farflung.tasks import Pending
from farflung.types import Contribution, Reduced, Reducer, Runtime, Seeds, StateSlot
from farflung.workloads import workload

__all__ = ["Costs", "Model", "costs_of", "measured_model", "step_s"]

NODES, BATCH, SEED = 4, 32, 0
_NO_RIDER = torch.zeros(0, dtype=torch.float64)


@dataclass(frozen=True)
class Model:
    """What is trained: the buckets of its gradient, and seconds of a forward and backward pass."""

    buckets: list[Filling]
    compute_s: float


@dataclass(frozen=True)
class Costs:
    """Processor seconds of one replica's exchange of each bucket: before its first message, and from then on."""

    before: list[float]
    after: list[float]


def measured_model(name: str, rounds: int) -> Model:
    """The workload's model; its passes are timed here, on one core."""
    model = workload(name).model(generator(SEED, "model"))
    inputs = torch.randn(BATCH, 3, 32, 32, generator=generator(SEED))
    targets = torch.randint(10, (BATCH,), generator=generator(SEED))
    times = []
    for _ in range(rounds + 1):
        begin = time.thread_time()
        F.cross_entropy(model(inputs), targets).backward()
        times.append(time.thread_time() - begin)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    return Model(fillings(trained), statistics.median(times[1:]))


def costs_of(reducer: Reducer, model: Model, steps: int) -> Costs:
    """What encoding, summing and decoding take: medians over replicas and steps but the first."""
    spent: list[list[tuple[float, float]]] = [[] for _ in model.buckets]

    async def replica(runtime: Runtime) -> None:
        slots = _slots(reducer, model, runtime.comm.rank)
        for step in range(steps + 1):
            for index in range(len(model.buckets)):
                channel = ExchangeChannel(runtime.comm, step + 1, index)
                grad = _gradient(model, index, step, runtime.comm.rank)
                before, after = await _timed(_exchange(reducer, slots[index], channel, grad, step))
                if step:
                    spent[index].append((before, after))

    world = VirtualWorld(NODES)
    world.run([replica(runtime) for runtime in world.runtimes])
    return Costs(
        [statistics.median(before for before, _ in bucket) for bucket in spent],
        [statistics.median(after for _, after in bucket) for bucket in spent],
    )


def step_s(
    reducer: Reducer, costs: Costs, model: Model, network: NetworkProfile, steps: int
) -> tuple[float, int]:
    """Virtual seconds of a step, and the bytes that a replica sends in it; the first step is left out.

    A forward pass takes a third of the passes' time, and buckets fill at even steps of the rest, as in farflung's own
    simulator. Exchanges take processor time from a core of their own, before their messages and after them.
    """
    nbytes = 0
    begins: list[float] = []

    async def carried(runtime: Runtime, slots: list[StateSlot], index: int, step: int) -> None:
        nonlocal nbytes
        await runtime.sleep_until(runtime.now() + costs.before[index])
        channel = ExchangeChannel(runtime.comm, step + 1, index)
        grad = _gradient(model, index, step, runtime.comm.rank)
        await _exchange(reducer, slots[index], channel, grad, step)
        nbytes += channel.sent_nbytes
        await runtime.sleep_until(runtime.now() + costs.after[index])

    async def replica(runtime: Runtime) -> None:
        slots = _slots(reducer, model, runtime.comm.rank)
        for step in range(steps + 1):
            if runtime.comm.rank == 0:
                begins.append(runtime.now())
            begin, third = runtime.now(), model.compute_s / 3
            flying: list[Pending[None]] = []
            for index in range(len(model.buckets)):
                await runtime.sleep_until(begin + third + 2 * third * (index + 1) / len(model.buckets))
                flying.append(runtime.launch(carried(runtime, slots, index, step)))
            for flight in flying:
                await flight
        if runtime.comm.rank == 0:
            begins.append(runtime.now())

    world = VirtualWorld(NODES, network=network)
    world.run([replica(runtime) for runtime in world.runtimes])
    return (begins[-1] - begins[1]) / steps, nbytes // (NODES * (steps + 1))


def _slots(reducer: Reducer, model: Model, rank: int) -> list[StateSlot]:
    return [
        StateSlot(reducer.init(bucket.spec, Seeds(index, 1000 * index + rank)))
        for index, bucket in enumerate(model.buckets)
    ]


def _gradient(model: Model, index: int, step: int, rank: int) -> Tensor:
    """Numbers of many magnitudes, as gradients have."""
    numel, noise = model.buckets[index].spec.numel, generator(SEED, index, step, rank)
    return torch.randn(numel, generator=noise) * torch.exp2(torch.randint(-8, 1, (numel,), generator=noise))


async def _exchange(
    reducer: Reducer, slot: StateSlot, channel: ExchangeChannel, grad: Tensor, step: int
) -> Reduced:
    reduced = await reducer.reduce(channel, slot, Contribution(grad, 1.0, _NO_RIDER), step=step)
    if reduced.learn is not None:
        slot.state = reduced.learn(slot.state)
    return reduced


async def _timed(exchange: Coroutine[Pending[Any], None, Reduced]) -> tuple[float, float]:
    """Processor seconds up to the first wait and after it."""
    spent: list[float] = []
    while True:
        begin = time.thread_time()
        try:
            awaited = exchange.send(None)
        except StopIteration:
            spent.append(time.thread_time() - begin)
            return spent[0], sum(spent[1:])
        spent.append(time.thread_time() - begin)
        await awaited
