"""Replicas that exchange one bucket in virtual time, by any reducer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflung.codecs.routed import scatter_runs
from farflung.comm import ExchangeChannel
from farflung.reducers import GradiVeQ, PowerSGD
from farflung.seeding import create_generator
from farflung.sim import LinkModel, VirtualWorld
from farflung.tasks import Pending
from farflung.types import (
    Contribution,
    ParameterSpan,
    Reducer,
    ReduceResult,
    Runtime,
    Seeds,
    StateSlot,
    TensorSpec,
)
from tests.helpers import NUMEL, same_bits, same_tree

PARTS = (ParameterSpan((4, 4, 3, 3), 0), ParameterSpan((10, 10), 144), ParameterSpan((13,), 244))
SPEC = TensorSpec((NUMEL,), torch.float32, PARTS)
WEIGHTS = (1.0, 0.5, 0.25, 2.0)
LINK = LinkModel(latency_s=0.05, bandwidth_bps=1e6)


NO_RIDER = torch.zeros(0, dtype=torch.float64)
SIDE = 8
"""Bytes of what rides beside the tensor when there is no metadata."""


def gradient(rank: int, step: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=create_generator(21, rank, step))


@dataclass
class Replica:
    """One rank's exchanges of one bucket.

    Args:
      width: how many exchanges are under way at once.
      first: the number of the first exchange.
    """

    runtime: Runtime
    reducer: Reducer
    spec: TensorSpec = SPEC
    width: int = 1
    make: Callable[[int, int], Tensor] = gradient
    weighted: bool = True
    first: int = 0
    results: list[ReduceResult] = field(default_factory=list)
    nbytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rank = self.runtime.comm.rank
        self.slot = StateSlot(self.reducer.init(self.spec, Seeds(5, 100 + self.rank)))

    async def run(self, steps: range) -> Replica:
        flying: list[tuple[Pending[ReduceResult], ExchangeChannel]] = []
        for step in steps:
            weight = WEIGHTS[self.rank] if self.weighted else 1.0
            metadata = torch.tensor([self.rank, 0.1 * step], dtype=torch.float64)
            channel = ExchangeChannel(self.runtime.comm, self.first + step, 0)
            own = Contribution(self.make(self.rank, step), weight, metadata)
            flying.append(
                (self.runtime.launch(self.reducer.reduce(channel, self.slot, own, step=step)), channel)
            )
            if len(flying) == self.width:
                await self._merge(*flying.pop(0))
        for flight in flying:
            await self._merge(*flight)
        return self

    async def _merge(self, pending: Pending[ReduceResult], channel: ExchangeChannel) -> None:
        reduced = await pending
        await self.runtime.launch(self._learn(reduced))  # behind the exchanges launched before
        self.results.append(ReduceResult(reduced.mean.clone(), reduced.weight, reduced.metadata))
        self.nbytes.append(channel.sent_nbytes)

    async def _learn(self, reduced: ReduceResult) -> None:
        if reduced.update_state is not None:
            self.slot.state = reduced.update_state(self.slot.state)
        if reduced.update_all_states is not None:
            self.slot.state = reduced.update_all_states({0: self.slot.state})[0]


def run(
    reducer: Reducer,
    size: int,
    steps: int = 3,
    link: LinkModel = LINK,
    late: Mapping[int, float] | None = None,
    first_step: int = 0,
    **options: Any,
) -> list[Replica]:
    """Replicas after some steps; those that are ``late`` begin after so many seconds."""
    world = VirtualWorld(size, link)
    replicas = [Replica(runtime, reducer, **options) for runtime in world.runtimes]

    async def body(replica: Replica) -> Replica:
        if late and replica.rank in late:
            await replica.runtime.sleep_until(late[replica.rank])
        return await replica.run(range(first_step, first_step + steps))

    return world.run([body(replica) for replica in replicas])


def exact_mean(size: int, step: int, weighted: bool = True) -> Tensor:
    weights = WEIGHTS[:size] if weighted else (1.0,) * size
    total = sum(w * gradient(rank, step).double() for rank, w in enumerate(weights))
    assert isinstance(total, Tensor)
    return total / sum(weights)


def assert_alike(replicas: list[Replica]) -> None:
    first = replicas[0]
    for other in replicas[1:]:
        for one, two in zip(first.results, other.results, strict=True):
            assert same_bits(one.mean, two.mean)
            assert same_bits(one.metadata, two.metadata)
            assert one.weight == two.weight
        assert same_tree(first.slot.state.shared, other.slot.state.shared)


def once(
    reducer: Reducer, grads: list[Tensor], *, link: LinkModel = LINK, spec: TensorSpec | None = None
) -> tuple[list[ReduceResult], list[int], float]:
    """One exchange: results, bytes sent, seconds."""
    world = VirtualWorld(len(grads), link)
    channels = [ExchangeChannel(runtime.comm, 1, 0) for runtime in world.runtimes]
    spec = spec or TensorSpec.from_tensor(grads[0])
    results = world.run(
        [
            reducer.reduce(
                channel,
                StateSlot(reducer.init(spec, Seeds(1, 2 + channel.rank))),
                Contribution(grad.clone(), 1.0, NO_RIDER),
                step=0,
            )
            for channel, grad in zip(channels, grads, strict=True)
        ]
    )
    return results, [channel.sent_nbytes for channel in channels], world.clock.time()


def left(replica: Replica) -> Tensor:
    """A rank's residual."""
    shared, local = replica.slot.state.shared, replica.slot.state.local
    whole = torch.zeros(SPEC.numel, dtype=torch.float64)
    if isinstance(replica.reducer, PowerSGD):
        for shape, starts in shared["layout"]["groups"].items():
            for start, matrix in zip(starts, local["residual"][shape], strict=True):
                whole[start : start + matrix.numel()] = matrix.reshape(-1)
        return whole
    if isinstance(replica.reducer, GradiVeQ):
        return whole.add_(local["residual"]["all"])
    if "seed" in local or "compress" in shared:  # what surrounds a codec's state
        shared, local = shared.get("codec", {}), local["codec"]
    if "residual" in local:
        return whole.add_(local["residual"])
    for role, runs in shared["runs"].items():
        if role in local:
            scatter_runs(whole, runs, local[role]["residual"].double())
    return whole
