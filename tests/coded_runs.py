"""Coded runs in virtual time, for tests: data, devices, and a coordinator that multiplies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflung.coded.blocks import BlockStore
from farflung.coded.coordinator import Coordinator, PartitionsChanged, Settings
from farflung.coded.device import Device
from farflung.coded.registry import BlockRegistry
from farflung.coded.run import simulate
from farflung.decisions import DecisionLog
from farflung.faults import FaultPlan
from farflung.network import Link
from farflung.sim import VirtualRuntime, VirtualWorld
from farflung.types import Json

__all__ = ["FEATURES", "Notes", "Run", "Seen", "part", "products_agree"]

FEATURES = 10
LATENCY_S = 0.01


def part(number: int, features: int = FEATURES, rows: int | None = None) -> tuple[Tensor, Tensor]:
    """Features and labels of one partition; unlike numbers of rows."""
    random = torch.Generator().manual_seed(number)
    rows = 20 + 3 * number if rows is None else rows
    data = torch.randn(rows, features, generator=random, dtype=torch.float64)
    return data, torch.sign(torch.randn(rows, generator=random, dtype=torch.float64))


class Notes:
    """A record in memory."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Json]]] = []
        self.kept: Any = None

    def load_registry(self) -> BlockRegistry | None:
        return None if self.kept is None else BlockRegistry.from_tree(self.kept)

    def save_registry(self, registry: BlockRegistry) -> None:
        self.kept = registry.to_tree()

    def record_event(self, event: str, **values: Json) -> None:
        self.events.append((event, values))

    def of(self, event: str) -> list[dict[str, Json]]:
        """What was told of one kind of event."""
        return [values for name, values in self.events if name == event]


@dataclass
class Seen:
    """What a run has come to.

    Args:
      found: what its body returned.
      coordinator: after it.
      notes: what has happened.
      sent: bytes by kind, from each rank to each.
      ended_s: the virtual time at which the body had returned.
    """

    found: Any
    coordinator: Coordinator
    notes: Notes
    sent: dict[str, dict[tuple[int, int], int]]
    ended_s: float

    def total(self, kind: str) -> int:
        """Bytes of a kind."""
        return sum(self.sent.get(kind, {}).values())


Body = Callable[[Coordinator], Awaitable[Any]]


@dataclass
class Run:
    """A coordinator and devices, of which the first ones bring a partition each.

    Args:
      partitions: at first.
      devices: at first.
      later: further devices, that join by a fault; what each brings, by partition.
      faults: what goes wrong.
      settings: besides.
      holdings: of devices that were there before, by rank.
    """

    partitions: int = 4
    devices: int = 6
    later: Sequence[int | None] = ()
    faults: FaultPlan = field(default_factory=FaultPlan)
    settings: Mapping[str, Any] = field(default_factory=dict)
    holdings: dict[int, BlockStore] = field(default_factory=dict)
    notes: Notes = field(default_factory=Notes)
    data: Callable[[int], tuple[Tensor, Tensor]] = part
    seconds_per_sample: float = 1e-4
    decisions: DecisionLog | None = None
    attending: dict[int, Device] = field(default_factory=dict)
    """The devices that are there, by rank."""

    def brings(self, rank: int) -> BlockStore:
        """What a device has when it comes."""
        if rank in self.holdings:
            return self.holdings[rank]
        place = rank - 1
        number: int | None = place if place < self.partitions else None
        if place >= self.devices:
            number = self.later[place - self.devices]
        return BlockStore() if number is None else BlockStore(f"part {number}", *self.data(number))

    def __call__(self, body: Body, **devices: Any) -> Seen:
        """Runs it in virtual time; ``body`` is called once the devices are there."""
        world = VirtualWorld(
            1 + self.devices + len(self.later),
            Link(LATENCY_S, 100e6),
            seconds_per_sample=self.seconds_per_sample,
            needs_all_members=False,
            faults=self.faults,
            decisions=self.decisions,
        )
        settings = Settings(partitions=self.partitions, devices=self.devices, **self.settings)
        runtimes = list(world.runtimes)

        async def multiply(coordinator: Coordinator) -> tuple[Any, Coordinator, float]:
            return await body(coordinator), coordinator, coordinator.elapsed_s

        def attend(runtime: VirtualRuntime) -> Device:
            rank = runtime.comm.rank
            holding = self.holdings[rank] = self.brings(rank)
            self.attending[rank] = Device(runtime, holding, **devices)
            return self.attending[rank]

        found, coordinator, ended_s = simulate(world, settings, attend, multiply, self.notes)  # type: ignore[arg-type]
        sent: dict[str, Counter[tuple[int, int]]] = {}
        for runtime in runtimes:
            for kind, counts in runtime.comm.sent_bytes.to_json().items():
                for rank, nbytes in enumerate(counts):
                    if nbytes:
                        sent.setdefault(kind, Counter())[runtime.comm.rank, rank] += nbytes
        return Seen(found, coordinator, self.notes, {k: dict(v) for k, v in sent.items()}, ended_s)


def products_agree(rounds: int = 10, data: Callable[[int], tuple[Tensor, Tensor]] = part) -> Body:
    """Multiplies, both ways, and gives the largest error relative to the largest entry of what is due."""

    async def body(coordinator: Coordinator) -> float:
        random, worst = torch.Generator().manual_seed(0), 0.0
        for _ in range(rounds):
            active = coordinator.activate_partitions()
            whole = torch.cat([data(int(one.name.removeprefix("part ")))[0] for one in active])
            weights = torch.randn(whole.shape[1], 2, generator=random, dtype=torch.float64)
            residuals = torch.randn(whole.shape[0], 2, generator=random, dtype=torch.float64)
            try:
                found = await coordinator.multiply(weights), await coordinator.multiply_transposed(residuals)
            except PartitionsChanged:
                continue
            for product, due in zip(found, (whole @ weights, whole.T @ residuals), strict=True):
                worst = max(worst, float((product - due).abs().max() / due.abs().max()))
        return worst

    return body
