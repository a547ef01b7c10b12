"""How much faster rates and step time let ScaDLES be, and how much faster it is in virtual time."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from benchmarks.common.worlds import replicas_in
from benchmarks.scadles.streamed import NETS, device, network
from farflung.config import Training
from farflung.loop import Replica
from farflung.sim import VirtualWorld
from farflung.workloads import create_workload

__all__ = ["BASE", "LEAST", "MOST", "baseline", "held", "kept", "limit", "per_second", "seconds", "weighted"]

BASE = 64
"""Samples of the baseline's batch on each device (section V)."""
LEAST, MOST = 8, 1024
STEPS = 12
"""So many are timed; all but the first take equally long."""


def baseline(rates: Sequence[float] | str) -> dict[str, str]:
    """As many samples on each device, however long they take to come."""
    return {"stream": f"rate({rates!r}, least={BASE})"}


def weighted(rates: Sequence[float] | str, policy: str = "persistence") -> dict[str, str]:
    """Batches, weights and learning rate by what a second of each stream brings."""
    stream = f"rate({rates!r}, window_s=1, least={LEAST}, most={MOST}, policy={policy!r}, weigh='by_rate')"
    return {"stream": stream, "scaling": "linear"}


def limit(rates: Sequence[float], step_s: float, most: int = MOST) -> float:
    """Samples per second of ScaDLES over the baseline's, if waiting and computing were all that takes time.

    The baseline waits for its batch on the slowest device, :math:`\\max(t, 64 / \\min S_i)`; ScaDLES takes a second's
    samples in :math:`\\max(t, 1)`, at most so many.
    """
    batches = [min(max(round(rate), LEAST), most) for rate in rates]
    ours_s = max(step_s, *(batch / rate for batch, rate in zip(batches, rates, strict=True)))
    theirs_s = max(step_s, BASE / min(rates))
    return (sum(batches) / ours_s) / (BASE * len(rates) / theirs_s)


def seconds(parts: dict[str, str], net: str, replicas: int, steps: int) -> list[float]:
    """When each step ends in virtual time."""
    return _steps(parts, net, replicas, steps)[0]


def _steps(parts: dict[str, str], net: str, replicas: int, steps: int) -> tuple[list[float], list[int]]:
    """Their ends and the samples of all replicas; what is trained is a quadratic, for times do not hang on it."""
    torch.set_num_threads(1)
    training = Training(steps=steps, batch_size=BASE, learning_rate=1e-6)
    world = VirtualWorld(replicas, device=device(NETS[net]), network=network(replicas))

    async def train(replica: Replica) -> tuple[list[float], list[int]]:
        ends, taken = [], []
        for _ in range(steps):
            before = replica._num_samples
            await replica.step()
            ends.append(replica.runtime.read_clock())
            taken.append(replica._num_samples - before)
        return ends, taken

    task = create_workload("synthetic/quadratic")
    return world.run([train(one) for one in replicas_in(world, task, training, parts)])[0]


def held(parts: dict[str, str], net: str, replicas: int, steps: int) -> int:
    """Samples that wait to be used after so many steps, of all devices."""
    torch.set_num_threads(1)
    training = Training(steps=steps, batch_size=BASE, learning_rate=1e-6)
    world = VirtualWorld(replicas, device=device(NETS[net]), network=network(replicas))

    async def train(replica: Replica) -> int:
        for _ in range(steps):
            await replica.step()
        arrivals = replica.components.stream.poll(replica.runtime.read_clock(), steps)
        return len(arrivals.ids)

    task = create_workload("synthetic/quadratic")
    return sum(world.run([train(one) for one in replicas_in(world, task, training, parts)]))


def kept(rates: Sequence[float], step_s: float, steps: int) -> float:
    """The closed form of what persistence keeps: :math:`\\sum_i (t S_i - b_i) T + S_i` (section III), from 0 up."""
    return sum(
        max(0.0, (step_s * rate - min(max(round(rate), LEAST), MOST)) * steps) + rate for rate in rates
    )


def per_second(parts: dict[str, str], rates: Sequence[float], net: str) -> float:
    """Samples that training takes in each second of virtual time, behind the first step."""
    ends, taken = _steps(parts, net, len(rates), STEPS)
    return sum(taken[1:]) / (ends[-1] - ends[0])
