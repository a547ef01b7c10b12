"""What aggregation takes in virtual time: windows as long as the paper's, with coding charged."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from farflung.calibration import CodingTask, measure_coding
from farflung.codecs import QSGD
from farflung.comm import ExchangeChannel, Purpose
from farflung.devices import CodingRates, DeviceProfile
from farflung.network import NetworkProfile
from farflung.reducers import CodecReducer, GradiVeQ
from farflung.seeding import create_generator
from farflung.sim import VirtualWorld
from farflung.types import Contribution, ParameterSpan, Reducer, Seeds, StateSlot, TensorSpec
from farflung.workloads import create_workload

__all__ = [
    "COMPRESS_STEPS",
    "QSGD_RING",
    "SAMPLE_STEPS",
    "Cluster",
    "Windows",
    "gradiveq",
    "rates",
]

SLICE_SIZE, SAMPLE_STEPS, COMPRESS_STEPS = 512, 100, 400
LATE = 1_000_000
"""A step behind every warm-up."""
COMPRESSED = 5
"""Exchanges of those that are compressed; all take equally long."""
QSGD_RING = CodecReducer(QSGD(bits=4), "ring", phases="hops")
PLAIN_RING = CodecReducer(collective="ring")
NO_RIDER = torch.zeros(0, dtype=torch.float64)


def gradiveq(ratio: float, sample_steps: int = SAMPLE_STEPS) -> GradiVeQ:
    """The paper's windows at K / d of ``ratio``; the warm-up is counted by itself."""
    return GradiVeQ(
        slice_size=SLICE_SIZE,
        ratio=ratio,
        warm_up=0,
        sample_steps=sample_steps,
        compress_steps=COMPRESS_STEPS,
        windows="paper",
        collective="ring",
    )


def spec_of(name: str) -> TensorSpec:
    """All gradients of a workload's model in one flat tensor."""
    parts, start = [], 0
    for parameter in create_workload(name).build_model(create_generator(0, "model")).parameters():
        parts.append(ParameterSpan(tuple(parameter.shape), start))
        start += parameter.numel()
    return TensorSpec((start,), spans=tuple(parts))


def rates(
    ratios: Sequence[float], spec: TensorSpec, nodes: int, rounds: int, sample_steps: int
) -> dict[str, Any]:
    """What coding takes on this machine, at the sizes of segments that so many nodes have; as JSON."""
    windows = [gradiveq(ratio, sample_steps) for ratio in ratios]
    reducers: list[Reducer] = [PLAIN_RING, QSGD_RING, *windows]
    tasks = [CodingTask("all", tuple(reducers))]
    found = measure_coding(tasks, [spec], rounds=rounds, replicas=nodes)
    return {"operations": [[*key, points] for key, points in found.items()]}


def from_json(kept: Mapping[str, Any]) -> CodingRates:
    """What :func:`rates` gave."""
    return CodingRates(
        {
            (operation, method): tuple((numel, seconds) for numel, seconds in points)
            for operation, method, points in kept["operations"]
        }
    )


@dataclass(frozen=True)
class Windows:
    """What aggregation takes, on average of a window, in seconds of an iteration.

    Args:
      sample_s: while gradients are sampled.
      compress_s: while they are compressed.
      change_s: once a window, for finding bases and saying that all have the same.
    """

    sample_s: float
    compress_s: float
    change_s: float

    @property
    def mean_s(self) -> float:
        """Of a whole window."""
        sampled, compressed = SAMPLE_STEPS * self.sample_s, COMPRESS_STEPS * self.compress_s
        return (sampled + self.change_s + compressed) / (SAMPLE_STEPS + COMPRESS_STEPS)


@dataclass(frozen=True)
class Cluster:
    """Nodes that exchange gradients of random numbers, of which no compressor can make more than their worst case.

    Args:
      network: between them.
      spec: of the gradient.
      coding: what coding takes; one processor of each node does it, while nothing is computed.
    """

    network: NetworkProfile
    spec: TensorSpec
    coding: CodingRates | None

    def plain_s(self) -> float:
        """An exchange of the dense ring."""
        return self._exchanges_s(PLAIN_RING, 1)[0]

    def qsgd_s(self) -> float:
        """An exchange of four bits, encoded anew on every hop."""
        return self._exchanges_s(QSGD_RING, 1)[0]

    def windows(self, ratio: float, sample_steps: int) -> Windows:
        """A window of GradiVeQ's."""
        reducer = gradiveq(ratio, sample_steps)
        seconds = self._exchanges_s(reducer, sample_steps + 1 + COMPRESSED)
        sample_s = statistics.median(seconds[: sample_steps - 1])
        compress_s = statistics.median(seconds[sample_steps + 1 :])
        # The last sample teaches the bases; the exchange behind it carries their hash and is one of the compressed.
        change_s = seconds[sample_steps - 1] - sample_s + seconds[sample_steps] - compress_s
        return Windows(sample_s, compress_s, change_s)

    def _exchanges_s(self, reducer: Reducer, count: int) -> list[float]:
        assert self.network.nodes is not None
        device = DeviceProfile(coding=self.coding, cores=1.0)
        world = VirtualWorld(self.network.nodes, device=device, network=self.network)
        return [seconds for seconds, _ in _exchanged(world, reducer, self.spec, range(count))]


def _exchanged(
    world: VirtualWorld, reducer: Reducer, spec: TensorSpec, steps: range
) -> list[tuple[float, int]]:
    """Seconds and bytes sent by all ranks of each exchange of noise."""
    torch.set_num_threads(1)

    async def replica(rank: int) -> list[tuple[float, int]]:
        comm = world.runtimes[rank].comm
        slot = StateSlot(reducer.init(spec, Seeds(0, rank)))
        noise, found = create_generator(0, "gradient", rank), []
        for step in steps:
            channel = ExchangeChannel(comm, Purpose.STEP.build_exchange_id(step), 0)
            own = Contribution(torch.randn(spec.numel, generator=noise), 1.0, NO_RIDER)
            begin = world.clock.time()
            result = await reducer.reduce(channel, slot, own, step=step)
            if result.update_state is not None:
                slot.state = result.update_state(slot.state)
            await channel.wait_computed()
            found.append((world.clock.time() - begin, channel.sent_nbytes))
        return found

    ranks = world.run([replica(rank) for rank in range(len(world.runtimes))])
    return [(of_step[0][0], sum(nbytes for _, nbytes in of_step)) for of_step in zip(*ranks, strict=True)]


def sent_ratio(reducer: Reducer, spec: TensorSpec, nodes: int) -> float:
    """Dense bytes over those sent, of a whole window behind the warm-up, samples included."""

    def sent(by: Reducer, first: int = 0, count: int = 1) -> list[int]:
        steps = range(first, first + count)
        return [nbytes for _, nbytes in _exchanged(VirtualWorld(nodes), by, spec, steps)]

    (dense,) = sent(PLAIN_RING)
    if not isinstance(reducer, GradiVeQ):
        return dense / sent(reducer, LATE)[0]
    sampled, *_, compressed = sent(reducer, reducer.warm_up, reducer.compute_num_exchanges(1))
    samples, others = reducer.sample_steps, reducer.compress_steps
    return dense * (samples + others) / (samples * sampled + others * compressed)
