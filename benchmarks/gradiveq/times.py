"""What aggregation takes in virtual time: windows as long as the paper's, with coding charged."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from farflung.codecs import QSGD
from farflung.comm import ExchangeChannel, Purpose
from farflung.devices import CodingRates, DeviceProfile
from farflung.network import NetworkProfile
from farflung.reducers import CodecReducer, GradiVeQ
from farflung.runtime import VirtualWorld
from farflung.seeding import generator
from farflung.timing import CodingTask, coding_points
from farflung.types import Contribution, Placed, Reducer, Seeds, StateSlot, TensorSpec

__all__ = ["COMPRESS_STEPS", "SAMPLE_STEPS", "Cluster", "Windows", "gradient_of", "gradiveq", "rates"]

SAMPLE_STEPS, COMPRESS_STEPS = 100, 400
COMPRESSED = 5
"""Exchanges of those that are compressed; all take equally long."""
QSGD_RING = CodecReducer(QSGD(bits=4), "ring", phases="hops")
PLAIN_RING = CodecReducer(collective="ring")
NO_RIDER = torch.zeros(0, dtype=torch.float64)


def gradiveq(slice_size: int, sample_steps: int = SAMPLE_STEPS) -> GradiVeQ:
    """The paper's settings but for the size of slices, and for the warm-up, which is counted by itself."""
    return GradiVeQ(
        slice_size=slice_size,
        warm_up=0,
        sample_steps=sample_steps,
        compress_steps=COMPRESS_STEPS,
        collective="ring",
    )


def gradient_of(model: nn.Module) -> TensorSpec:
    """All gradients in one flat tensor."""
    parts, start = [], 0
    for parameter in model.parameters():
        parts.append(Placed(tuple(parameter.shape), start))
        start += parameter.numel()
    return TensorSpec((start,), parts=tuple(parts))


def rates(
    slice_sizes: Sequence[int], spec: TensorSpec, nodes: int, rounds: int, sample_steps: int
) -> dict[str, Any]:
    """What coding takes on this machine, at the sizes of segments that so many nodes have; as JSON."""
    windows = [gradiveq(size, sample_steps) for size in slice_sizes]
    reducers: list[Reducer] = [PLAIN_RING, QSGD_RING, *windows]
    tasks = [CodingTask("all", tuple(reducers))]
    found = coding_points(tasks, [spec], rounds=rounds, replicas=nodes)
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
      ratio: dense bytes of convolutions over those of their coefficients.
    """

    sample_s: float
    compress_s: float
    change_s: float
    ratio: float

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
        return self._exchanges_s(PLAIN_RING, 1)[0][0]

    def qsgd_s(self) -> float:
        """An exchange of four bits, encoded anew on every hop."""
        return self._exchanges_s(QSGD_RING, 1)[0][0]

    def windows(self, slice_size: int, sample_steps: int) -> Windows:
        """A window of GradiVeQ's."""
        reducer = gradiveq(slice_size, sample_steps)
        seconds, states = self._exchanges_s(reducer, sample_steps + 1 + COMPRESSED)
        sample_s = statistics.median(seconds[: sample_steps - 1])
        compress_s = statistics.median(seconds[sample_steps + 1 :])
        # The last sample teaches the bases; the exchange behind it carries their hash and is one of the compressed.
        change_s = seconds[sample_steps - 1] - sample_s + seconds[sample_steps] - compress_s
        return Windows(sample_s, compress_s, change_s, ratio_of(states[0]))

    def _exchanges_s(self, reducer: Reducer, count: int) -> tuple[list[float], list[Mapping[str, Any]]]:
        nodes = self.network.nodes
        assert nodes is not None
        torch.set_num_threads(1)
        device = DeviceProfile(coding=self.coding, cores=1.0)
        world = VirtualWorld(nodes, device=device, network=self.network, closed_form=False)
        seconds: list[float] = []

        async def replica(rank: int) -> Mapping[str, Any]:
            comm = world.runtimes[rank].comm
            slot = StateSlot(reducer.init(self.spec, Seeds(0, rank)))
            noise = generator(0, "gradient", rank)
            for step in range(count):
                channel = ExchangeChannel(comm, Purpose.STEP.at(step), 0)
                own = Contribution(torch.randn(self.spec.numel, generator=noise), 1.0, NO_RIDER)
                begin = world.clock.now()
                result = await reducer.reduce(channel, slot, own, step=step)
                if result.learn is not None:
                    slot.state = result.learn(slot.state)
                await channel.computed()
                if rank == 0:
                    seconds.append(world.clock.now() - begin)
            return slot.state.shared

        states = world.run([replica(rank) for rank in range(nodes)])
        return seconds, states


def ratio_of(state: Mapping[str, Any]) -> float:
    """Numbers in convolutions over the coefficients that they travel as, in a window that is compressed."""
    layers = {f"{number:04}": layer for number, layer in enumerate(state["layout"]["layers"])}
    dense = coded = 0
    for name, basis in state["bases"].items():
        _, filters, depth, positions, each = layers[name.split(".")[0]]
        dense += positions * depth * filters
        coded += positions // each * basis.shape[1]
    return dense / coded
