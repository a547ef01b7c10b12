"""Measurement of coding on this machine: real reducers, with a stopwatch around their computations."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from typing_extensions import override

from farflung.codecs import CODECS
from farflung.comm import ExchangeChannel, Purpose
from farflung.devices import Points
from farflung.errors import Unsupported
from farflung.reducers import REDUCERS, CodecReducer
from farflung.sim import VirtualWorld
from farflung.spec import build
from farflung.tasks import Pending
from farflung.types import (
    Codec,
    Communicator,
    Contribution,
    ParameterSpan,
    Payload,
    Reducer,
    Seeds,
    StateSlot,
    TensorSpec,
)

__all__ = ["CodingTask", "build_coding_tasks", "build_ladder", "measure_coding", "select_specs"]

Durations: TypeAlias = "dict[tuple[str, int, str], list[float]]"
"""Seconds by operation, number of elements and method."""

REPLICAS = 2
"""Default number of ranks that exchange while the stopwatch runs; each computes for itself."""
WARM_UP = 2
"""Number of first exchanges that are not counted, since they allocate."""
LATE_STEP = 1 << 20
"""Step at which no method warms up any more."""
MIN_NUMEL, GROWTH, MAX_NUMEL = 1 << 10, 4, 1 << 22
"""Sizes that are measured, in elements; times of larger tensors are extrapolated."""
MIN_SPACING = 1.5
"""Minimum ratio of two neighbouring sizes."""
KERNEL = (16, 16)
"""Filters and depth of a convolution in place of a matrix."""
_PHASES: tuple[Literal["gather", "two", "hops"], ...] = ("gather", "two", "hops")


class CodingTask(NamedTuple):
    """Codec or reducer to measure.

    Args:
      name: Name as in recipes.
      reducers: Reducers that run it; for a codec, one for each kind of all-reduce.
    """

    name: str
    reducers: tuple[Reducer, ...]


def build_coding_tasks(
    codecs: Iterable[str] | None = None, reducers: Iterable[str] | None = None
) -> list[CodingTask]:
    """Builds the tasks for some codecs and reducers, plain sums first; for all registered ones if none are given.

    Args:
      codecs: Codecs as in recipes; if neither argument is given, all registered ones with default options.
      reducers: Reducers, likewise, without the one around codecs.

    Raises:
      BadInput: A codec, a reducer or an option is unknown.
    """
    if codecs is None and reducers is None:
        codecs, reducers = CODECS, (name for name in REDUCERS if name != "codec")
    tasks = {"identity": CodingTask("identity", (CodecReducer(),))}
    for text in codecs or ():
        codec: Codec = build("codec", text, CODECS)
        tasks.setdefault(text, CodingTask(text, tuple(CodecReducer(codec, phases=p) for p in _PHASES)))
    for text in reducers or ():
        reducer: Reducer = build("reducer", text, REDUCERS)
        tasks.setdefault(text, CodingTask(text, (reducer,)))
    return list(tasks.values())


def build_ladder(max_numel: int = MAX_NUMEL) -> list[TensorSpec]:
    """Builds flat tensors of one matrix each, up to a size."""
    specs = []
    numel = MIN_NUMEL
    while numel <= min(max_numel, MAX_NUMEL):
        rows = 1 << (numel.bit_length() - 1) // 2
        specs.append(TensorSpec((numel,), spans=(ParameterSpan((rows, numel // rows), 0),)))
        numel *= GROWTH
    return specs


def select_specs(buckets: Sequence[TensorSpec]) -> list[TensorSpec]:
    """Returns a model's buckets up to :data:`MAX_NUMEL`, and tensors of sizes between them, which stand for segments.

    Args:
      buckets: Buckets of its gradients.
    """
    sizes = {spec.numel: spec for spec in buckets if spec.numel <= MAX_NUMEL}
    rungs = build_ladder(max(spec.numel for spec in buckets))
    gaps = [r for r in rungs if not any(r.numel <= numel < MIN_SPACING * r.numel for numel in sizes)]
    return [*gaps, *sizes.values()]


def measure_coding(
    tasks: Iterable[CodingTask],
    specs: Sequence[TensorSpec],
    *,
    rounds: int = 10,
    replicas: int = REPLICAS,
    clock: Callable[[], float] = time.thread_time,
    on_begin: Callable[[str], None] = lambda name: None,
) -> dict[tuple[str, str], Points]:
    """Measures median times of exchanges by operation and method, for :class:`farflung.devices.CodingRates`.

    Replicas of virtual time exchange random numbers by each reducer. Every operation that is charged to a
    modelled device is timed under the same name, until its channel is called again.

    Args:
      tasks: Tasks to measure.
      specs: Tensors to exchange.
      rounds: Number of counted exchanges, of each tensor by each reducer.
      replicas: Number of replicas; the more, the smaller the measured segments.
      clock: Function that returns seconds; by default, this thread's processor time.
      on_begin: Callback that gets the name of the next task.
    """
    durations: Durations = {}
    for task in tasks:
        on_begin(task.name)
        for reducer in task.reducers:
            for spec in specs:
                with suppress(Unsupported):  # a codec without this kind of all-reduce
                    _time_exchanges(
                        reducer, _reshape_unsupported_spec(reducer, spec), rounds, replicas, clock, durations
                    )
    points: dict[tuple[str, str], dict[int, float]] = {}
    for (operation, numel, method), seconds in durations.items():
        if numel:
            points.setdefault((operation, method), {})[numel] = statistics.median(seconds)
    requested = {spec.numel for spec in specs}
    return {key: _drop_close_points(values, requested) for key, values in points.items()}


def _drop_close_points(points: Mapping[int, float], requested: Collection[int]) -> Points:
    """Returns points sorted by size, without those slightly smaller than the next; requested sizes are kept."""
    thinned: list[tuple[int, float]] = []
    for numel in sorted(points, reverse=True):
        if not thinned or numel in requested or numel * MIN_SPACING <= thinned[-1][0]:
            thinned.append((numel, float(f"{points[numel]:.4g}")))
    return tuple(reversed(thinned))


class _TimedChannel(ExchangeChannel):
    """Channel that times each charged operation until the next call.

    Args:
      comm: Communicator of one replica.
      step: Step of the exchange.
      clock: Function that returns seconds.
      durations: Collects the seconds of each operation.
    """

    def __init__(
        self,
        comm: Communicator,
        step: int,
        clock: Callable[[], float],
        durations: Durations,
    ) -> None:
        super().__init__(comm, Purpose.STEP.build_exchange_id(step), 0)
        self._clock, self._durations = clock, durations
        self._running: tuple[str, int, str] | None = None
        self._begin_s = 0.0

    def stop(self) -> None:
        """Ends the running operation, if any."""
        if self._running is not None:
            self._durations.setdefault(self._running, []).append(self._clock() - self._begin_s)
            self._running = None

    @override
    def charge(self, operation: str, numel: int, method: str = "") -> None:
        self.stop()
        super().charge(operation, numel, method)
        self._running, self._begin_s = (operation, numel, method), self._clock()

    @override
    def reserve_hops(self, count: int) -> int:
        self.stop()
        return super().reserve_hops(count)

    @override
    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]:
        self.stop()
        return super().send(payload, dst, hop)

    @override
    def recv(self, src: int, hop: int, expect: tuple[TensorSpec, ...] | None = None) -> Pending[Payload]:
        self.stop()
        return super().recv(src, hop, expect)


def _reshape_unsupported_spec(reducer: Reducer, spec: TensorSpec) -> TensorSpec:
    """Returns the spec, or one of equal size with a single convolution if the reducer does not support it."""
    try:
        reducer.check([spec])
    except Unsupported:
        return replace(spec, spans=(ParameterSpan((*KERNEL, spec.numel // math.prod(KERNEL), 1), 0),))
    return spec


def _time_exchanges(
    reducer: Reducer,
    spec: TensorSpec,
    rounds: int,
    replicas: int,
    clock: Callable[[], float],
    durations: Durations,
) -> None:
    world = VirtualWorld(replicas)
    warm_up = max(WARM_UP, reducer.compute_num_exchanges(1))

    async def run_replica(rank: int) -> None:
        comm = world.runtimes[rank].comm
        slot = StateSlot(reducer.init(spec, Seeds(0, rank)))
        noise = torch.Generator().manual_seed(rank)
        gradient = torch.randn(spec.numel, generator=noise).to(spec.dtype)
        for step in range(LATE_STEP, LATE_STEP + warm_up + rounds):
            # Rare kinds of exchanges count even if they come early.
            recorded = durations if step >= LATE_STEP + WARM_UP else {}
            channel = _TimedChannel(comm, step, clock, recorded)
            contribution = Contribution(gradient.clone(), 1.0, torch.zeros(0, dtype=torch.float64))
            result = await reducer.reduce(channel, slot, contribution, step=step)
            channel.stop()
            if result.update_state is not None:
                slot.state = result.update_state(slot.state)
                channel.stop()

    world.run([run_replica(rank) for rank in range(replicas)])
