"""Measures what coding takes on this machine: the reducers themselves, with a stopwatch around what they compute."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, NamedTuple, TypeVar

import torch
from typing_extensions import override

from farflung.codecs import CODECS
from farflung.comm import ExchangeChannel, Purpose
from farflung.devices import Points
from farflung.errors import Unsupported
from farflung.reducers import REDUCERS, CodecReducer
from farflung.sim import VirtualWorld
from farflung.spec import build
from farflung.types import (
    Codec,
    CodingCost,
    Communicator,
    Contribution,
    Placed,
    Reducer,
    Seeds,
    StateSlot,
    TensorSpec,
)

__all__ = ["CodingTask", "coding_points", "coding_tasks", "ladder", "tensors_like"]

T = TypeVar("T")

REPLICAS = 2
"""Ranks that exchange with each other while the stopwatch runs, unless said otherwise; each computes for itself."""
WARM_UP = 2
"""Exchanges that are not counted: the first ones allocate."""
LATE = 1 << 20
"""A step at which no method warms up any more."""
SMALLEST, GROWTH, LARGEST = 1 << 10, 4, 1 << 22
"""Sizes that are measured, in elements; what is larger grows with its size."""
SPACING = 1.5
"""The least ratio of two neighbouring sizes that are kept."""
KERNEL = (16, 16)
"""Filters and depth of a convolution in place of a matrix."""
_WAYS: tuple[Literal["gather", "two", "hops"], ...] = ("gather", "two", "hops")


class CodingTask(NamedTuple):
    """A codec or reducer to be measured.

    Args:
      name: as recipes write it.
      reducers: by which it is carried; the ways of a codec.
    """

    name: str
    reducers: tuple[Reducer, ...]


def coding_tasks(
    codecs: Iterable[str] | None = None, reducers: Iterable[str] | None = None
) -> list[CodingTask]:
    """What to measure, plain sums first.

    Args:
      codecs: text as in recipes; every codec of the registry with its default options when neither is given.
      reducers: likewise, without the one around codecs.

    Raises:
      BadInput: no such codec or reducer, or not an option of it.
    """
    if codecs is None and reducers is None:
        codecs, reducers = CODECS, (name for name in REDUCERS if name != "codec")
    found = {"identity": CodingTask("identity", (CodecReducer(),))}
    for text in codecs or ():
        codec: Codec = build("codec", text, CODECS)
        found.setdefault(text, CodingTask(text, tuple(CodecReducer(codec, phases=way) for way in _WAYS)))
    for text in reducers or ():
        reducer: Reducer = build("reducer", text, REDUCERS)
        found.setdefault(text, CodingTask(text, (reducer,)))
    return list(found.values())


def ladder(largest: int = LARGEST) -> list[TensorSpec]:
    """Flat tensors of one matrix each, up to a size."""
    specs = []
    numel = SMALLEST
    while numel <= min(largest, LARGEST):
        rows = 1 << (numel.bit_length() - 1) // 2
        specs.append(TensorSpec((numel,), parts=(Placed((rows, numel // rows), 0),)))
        numel *= GROWTH
    return specs


def tensors_like(buckets: Sequence[TensorSpec]) -> list[TensorSpec]:
    """What to measure with for a model: its buckets, and a ladder of smaller tensors, for what is cut into segments.

    Args:
      buckets: of its gradients; those that are larger than the ladder goes are left out.
    """
    own = {spec.numel: spec for spec in buckets if spec.numel <= LARGEST}
    rungs = ladder(max(spec.numel for spec in buckets))
    between = [rung for rung in rungs if not any(rung.numel <= numel < SPACING * rung.numel for numel in own)]
    return [*between, *own.values()]


def coding_points(
    tasks: Iterable[CodingTask],
    specs: Sequence[TensorSpec],
    *,
    rounds: int = 10,
    replicas: int = REPLICAS,
    clock: Callable[[], float] = time.thread_time,
    begins: Callable[[str], None] = lambda name: None,
) -> dict[tuple[str, str], Points]:
    """Medians of what is computed in exchanges, by operation and method, for :class:`farflung.devices.CodingRates`.

    Replicas of virtual time carry random numbers by each reducer. Whatever their exchanges charge to a modelled device
    is timed, so what is measured has the names of what is charged.

    Args:
      tasks: what to measure.
      specs: of the tensors.
      rounds: exchanges that count, of each tensor by each reducer.
      replicas: how many exchange with each other; the more, the smaller the segments that are measured.
      clock: in seconds; by default those of this thread's processor, whatever else the machine does.
      begins: is told the name of what is measured next.
    """
    taken: dict[CodingCost, list[float]] = {}
    for task in tasks:
        begins(task.name)
        for reducer in task.reducers:
            for spec in specs:
                with suppress(Unsupported):  # a codec that cannot go this way
                    _exchange(reducer, _fitting(reducer, spec), rounds, replicas, clock, taken)
    points: dict[tuple[str, str], dict[int, float]] = {}
    for cost, seconds in taken.items():
        if cost.numel:
            points.setdefault((cost.operation, cost.method), {})[cost.numel] = statistics.median(seconds)
    asked = {spec.numel for spec in specs}
    return {key: _thinned(of_key, asked) for key, of_key in points.items()}


def _thinned(points: Mapping[int, float], asked: Collection[int]) -> Points:
    """By rising size; of sizes close to each other, which segments of unlike tensors are, the largest."""
    kept: list[tuple[int, float]] = []
    for numel in sorted(points, reverse=True):
        if not kept or numel in asked or numel * SPACING <= kept[-1][0]:
            kept.append((numel, float(f"{points[numel]:.4g}")))
    return tuple(reversed(kept))


class _TimedChannel(ExchangeChannel):
    """A channel with a stopwatch around what is computed.

    Args:
      comm: of one replica.
      step: of the exchange.
      clock: in seconds.
      taken: takes the seconds.
    """

    def __init__(
        self, comm: Communicator, step: int, clock: Callable[[], float], taken: dict[CodingCost, list[float]]
    ) -> None:
        super().__init__(comm, Purpose.STEP.at(step), 0)
        self._clock, self._taken = clock, taken

    @override
    def compute(self, cost: CodingCost, fn: Callable[[], T]) -> T:
        begin = self._clock()
        value = super().compute(cost, fn)
        self._taken.setdefault(cost, []).append(self._clock() - begin)
        return value


def _fitting(reducer: Reducer, spec: TensorSpec) -> TensorSpec:
    """The tensor, as one convolution where the reducer has no use for what it is made of."""
    try:
        reducer.check([spec])
    except Unsupported:
        return replace(spec, parts=(Placed((*KERNEL, spec.numel // math.prod(KERNEL), 1), 0),))
    return spec


def _exchange(
    reducer: Reducer,
    spec: TensorSpec,
    rounds: int,
    replicas: int,
    clock: Callable[[], float],
    taken: dict[CodingCost, list[float]],
) -> None:
    world = VirtualWorld(replicas)
    unlike = max(WARM_UP, reducer.exchanges_until(1))

    async def replica(rank: int) -> None:
        comm = world.runtimes[rank].comm
        slot = StateSlot(reducer.init(spec, Seeds(0, rank)))
        noise = torch.Generator().manual_seed(rank)
        gradient = torch.randn(spec.numel, generator=noise).to(spec.dtype)
        for step in range(LATE, LATE + unlike + rounds):
            # Kinds of exchanges that are seldom count even where they come early.
            counted = taken if step >= LATE + WARM_UP else {}
            channel = _TimedChannel(comm, step, clock, counted)
            own = Contribution(gradient.clone(), 1.0, torch.zeros(0, dtype=torch.float64))
            result = await reducer.reduce(channel, slot, own, step=step)
            if result.learn is not None:
                slot.state = result.learn(slot.state)

    world.run([replica(rank) for rank in range(replicas)])
