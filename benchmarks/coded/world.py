"""Coded runs in virtual time: a coordinator, devices of which the first ones bring a partition, and what they send."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

import torch
from torch import Tensor

from farflung.coded.blocks import BlockStore
from farflung.coded.coordinator import Coordinator, Settings
from farflung.coded.device import Device
from farflung.coded.parts import partition_rows
from farflung.coded.run import simulate
from farflung.devices import DeviceProfile
from farflung.network import Link
from farflung.sim import VirtualRuntime, VirtualWorld
from farflung.types import Runtime

__all__ = ["Body", "Part", "Ran", "noise", "parts_of", "run"]

T = TypeVar("T")
Part: TypeAlias = tuple[Tensor, Tensor]
Body: TypeAlias = Callable[[Coordinator, Runtime], Awaitable[T]]


@dataclass(frozen=True, slots=True)
class Ran(Generic[T]):
    """What a run has come to.

    Args:
      found: what its body returned.
      sent: payload bytes that all have sent, by kind.
    """

    found: T
    sent: Counter[str]


def parts_of(features: Tensor, labels: Tensor, partitions: int) -> list[Part]:
    """Consecutive rows for each partition, in numbers as equal as can be."""
    return [(features[rows], labels[rows]) for rows in partition_rows(len(features), partitions)]


def noise(rows: int, features: int, partitions: int) -> list[Part]:
    """Normal numbers, with labels of 1, for what does not depend on the data."""
    data = torch.randn(rows, features, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return parts_of(data, torch.ones(rows, dtype=torch.float64), partitions)


def run(
    parts: Sequence[Part],
    settings: Settings,
    body: Body[T],
    *,
    device: DeviceProfile | None = None,
    link: Link | None = None,
    seed: int = 0,
) -> Ran[T]:
    """Runs in virtual time.

    Args:
      parts: of the first devices; the others bring nothing.
      settings: of the run.
      body: is called with the coordinator and its world once the devices are there and their data encoded.
      device: what computing takes on each; nothing when not given.
      link: between any two; messages take no time when not given.
      seed: of the devices' stragglers.
    """
    world = VirtualWorld(
        1 + settings.devices,
        link or Link(),
        device=device or DeviceProfile(),
        seed=seed,
        needs_all_members=False,
    )

    def attend(runtime: VirtualRuntime) -> Device:
        place = runtime.comm.rank - 1
        return Device(
            runtime, BlockStore(f"part {place}", *parts[place]) if place < len(parts) else BlockStore()
        )

    async def settled(coordinator: Coordinator) -> T:
        coordinator.activate_partitions()
        return await body(coordinator, world.runtimes[0])

    found = simulate(world, settings, attend, settled)
    sent: Counter[str] = Counter()
    for runtime in world.runtimes:
        sent.update({kind: sum(counts) for kind, counts in runtime.comm.sent_bytes.to_json().items()})
    return Ran(found, sent)
