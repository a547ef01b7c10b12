"""A forward pass whose parameters come from a server, in an order of priorities."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import torch

from benchmarks.tictac.cells import BANDWIDTH_BPS
from benchmarks.tictac.models import BATCH_SIZE, MODELS
from farflung.network import Link, NetworkProfile
from farflung.schedules.orders import rank_by_tic
from farflung.sim import VirtualWorld
from farflung.types import Cost, Payload, Runtime, Tag

__all__ = ["inference_gains"]


def inference_gains(model: str, ratio: float, seeds: Sequence[int]) -> list[float]:
    """Returns the fraction that TIC's order gains over each of several random orders.

    Args:
      model: Name in :data:`benchmarks.tictac.models.MODELS`.
      ratio: Time of all transfers over that of the forward pass.
      seeds: Seeds of the random orders.
    """
    count = len(MODELS[model].numels)
    needs = [frozenset(range(layer + 1)) for layer in range(count)]
    ordered_s = _forward_s(model, ratio, rank_by_tic(needs, range(count)))
    random = [
        dict(enumerate(torch.randperm(count, generator=torch.Generator().manual_seed(seed)).tolist()))
        for seed in seeds
    ]
    return [_forward_s(model, ratio, ranks) / ordered_s - 1 for ranks in random]


def _forward_s(name: str, ratio: float, ranks: Mapping[int, int]) -> float:
    """Seconds from a request to the end of a forward pass."""
    model = MODELS[name]
    transfers_s = 32 * sum(model.numels) / BANDWIDTH_BPS
    network = NetworkProfile.create_uniform(Link(0.002, BANDWIDTH_BPS), 2)
    world = VirtualWorld(2, device=model.device(3 * transfers_s / ratio), network=network)
    buckets = len(model.numels)
    order = range(buckets)

    async def serve(runtime: Runtime) -> None:
        for layer in sorted(order, key=ranks.__getitem__):
            payload = Payload((torch.empty(model.numels[layer]),))
            runtime.comm.send(payload, 1, Tag(layer), ranks[layer])

    async def receive(runtime: Runtime, bucket: int) -> None:
        await runtime.comm.recv(0, Tag(buckets - 1 - bucket))

    async def infer(runtime: Runtime) -> None:
        # Buckets are numbered from the output side.
        cost = Cost("forward", BATCH_SIZE, tuple(reversed(model.numels)))
        uses = [buckets - 1 - layer for layer in order]
        await runtime.run_forward(cost, uses, lambda use: None, partial(receive, runtime))

    world.run([serve(world.runtimes[0]), infer(world.runtimes[1])])
    return world.clock.time()
