"""What steps take in virtual time: a quadratic as large as the gradient in question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from benchmarks.common.worlds import replicas_in
from farflung.config import Training
from farflung.devices import CodingRates, DeviceProfile, find_device
from farflung.loop import Replica
from farflung.network import NetworkProfile
from farflung.sim import VirtualWorld
from farflung.workloads import Quadratic

__all__ = ["Simulated", "coding_of"]


def coding_of(device: str, *, reduced: int = 1, times: float = 1.0) -> CodingRates:
    """What coding takes on a named device, in a simulation of tensors that are smaller than those that are meant.

    Bytes of messages are not charged: they are copied piece by piece while others are on their way, which smaller
    tensors have no pieces for, and the papers' clusters encrypt nothing.

    Args:
      device: in :data:`farflung.devices.DEVICES`.
      reduced: how many times smaller tensors are; each takes as long as the whole one would.
      times: how many times as long everything takes.
    """
    rates = find_device(device, forward_flops=1.0).coding
    assert rates is not None
    operations = {
        key: tuple({numel // reduced: seconds for numel, seconds in points if numel >= reduced}.items())
        for key, points in rates.operations.items()
    }
    fewer = CodingRates({key: points for key, points in operations.items() if points}, rates.message_s)
    return fewer.scale(times, times)


@dataclass(frozen=True)
class Simulated:
    """Replicas whose steps take no time but what is modelled.

    Args:
      parts: members of the recipe.
      network: between the replicas; as many as it has nodes.
      compute_s: of a step, a third of it forward.
      nbytes: of a gradient, in one bucket.
      coding: what coding takes, with nothing computed meanwhile; nothing when not given.
      slow: how many times as long the last replica computes.
    """

    parts: Mapping[str, str]
    network: NetworkProfile
    compute_s: float
    nbytes: int
    coding: CodingRates | None = None
    slow: float = 1.0
    ends_s: list[float] = field(default_factory=list, init=False)
    """When rank 0's steps ended."""
    _ends_s: list[list[float]] = field(default_factory=list, init=False)
    """When each replica's did."""

    def run(self, steps: int) -> float:
        """Seconds for all steps and what is under way after them."""
        torch.set_num_threads(1)
        nodes = self.network.nodes
        assert nodes is not None
        devices = [
            DeviceProfile(forward_s=factor * self.compute_s / 3, coding=self.coding, cores=1.0)
            for factor in [1.0] * (nodes - 1) + [self.slow]
        ]
        world = VirtualWorld(nodes, device=devices, network=self.network)
        training = Training(steps=steps, batch_size=1, learning_rate=0.01)
        task = Quadratic(dim=self.nbytes // 4, samples=max(2, nodes), groups=1)
        replicas = replicas_in(world, task, training, self.parts)
        self._ends_s[:] = [[] for _ in replicas]

        async def train(replica: Replica, ends_s: list[float]) -> None:
            for _ in range(steps):
                await replica.step()
                ends_s.append(world.clock.time())
            await replica.flush()

        world.run([train(*each) for each in zip(replicas, self._ends_s, strict=True)])
        self.ends_s[:] = self._ends_s[0]
        return world.clock.time()

    def period_s(self, steps: int, *, after: int) -> float:
        """Seconds for each of ``steps`` steps, once ``after`` have passed."""
        self.run(after + steps)
        return (self.ends_s[-1] - self.ends_s[after - 1]) / steps

    def update_s(self, steps: int) -> float:
        """Seconds for each update of any replica, until one of them has done all its steps."""
        self.run(steps)
        until = min(ends_s[-1] for ends_s in self._ends_s)
        return until / sum(end <= until for ends_s in self._ends_s for end in ends_s)
