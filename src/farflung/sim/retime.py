"""Replay of a run without its arithmetic: replicas whose gradients have sizes and no values."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

import torch
from torch import Tensor, nn
from typing_extensions import override

from farflung.engine import StepMetadata
from farflung.errors import DataError
from farflung.loop import Checkpoints, Replica
from farflung.sim.traffic import Op, Traffic
from farflung.telemetry import BYTES, TIMES, Event, Sink
from farflung.types import (
    Batch,
    Channel,
    CodecState,
    CodingCost,
    Contribution,
    Dataset,
    Json,
    Payload,
    Reduced,
    Reducer,
    SampleIds,
    ScoredBy,
    Seeds,
    State,
    StateSlot,
    TensorSpec,
    Workload,
)

__all__ = ["Retimed", "retimed_events"]

S = TypeVar("S")


@dataclass(slots=True)
class Retimed(Replica):
    """Replica that draws batches and sends what a run has sent, and computes nothing.

    Args:
      traffic: Traffic of the run.
      has_checkpoints: The run wrote checkpoints; all replicas then wait for each other at these steps.
    """

    traffic: Traffic = field(default_factory=Traffic)
    checkpointed: bool = True

    @override
    def __post_init__(self) -> None:
        self.workload = _Hollow(self.workload)
        self.parts = replace(self.parts, reducer=_Mover(self.traffic, self.parts.reducer))
        self.checkpoints = _Unkept() if self.checkpointed else None
        Replica.__post_init__(self)

    @override
    def forward(self, batch: Batch, weights: Tensor | None) -> tuple[Tensor, StepMetadata]:
        del weights
        return torch.zeros(()), StepMetadata(0.0, self.drawing.weight(len(batch)), len(batch))

    @override
    def scorer(self, by: ScoredBy) -> Callable[[SampleIds], Tensor]:
        return lambda ids: torch.ones(len(ids))

    @override
    def losses(self) -> Callable[[SampleIds], Tensor]:
        return lambda ids: torch.full((len(ids),), math.nan)

    @override
    def backward(self, loss: Tensor, ready: Callable[[int], None]) -> None:
        del loss
        rank, buckets = self.runtime.comm.rank, range(len(self.buckets.buckets))
        order = self.traffic.fills.get((self.step_done, rank), buckets)
        if sorted(order) != [*buckets]:
            raise DataError(f"the run's traffic has no order of {len(buckets)} buckets: simulate it again")
        for index in order:
            ready(index)

    @override
    def update(self) -> None:
        """Does nothing."""


def retimed_events(stored: Sequence[Event], *sinks: Sink) -> Sink:
    """Builds a sink for one retimed replica, which changes only times and bytes of the stored events.

    Args:
      stored_events: Events of the same replica in the run.
      sinks: Sinks that receive the events.

    Raises:
      DataError: The replica emits another event than it did in the run.
    """
    # By key: an evaluation is reported when all ranks have reached it, which may be steps later.
    expected: dict[tuple[Json, ...], deque[Event]] = {}
    for event in stored:
        expected.setdefault(_named(event), deque()).append(event)

    def emit_retimed(event: Event) -> None:
        queue = expected.get(_named(event))
        if not queue or not (TIMES | BYTES) & queue[0].keys() <= event.keys():
            raise DataError(
                f"the run's events and its traffic differ at {event['event']} of rank {event['rank']}: "
                "simulate it again"
            )
        stored_event = queue.popleft()
        result: Event = {
            key: event[key] if key in TIMES | BYTES else value for key, value in stored_event.items()
        }
        for target in sinks:
            target(result)

    return emit_retimed


def _named(event: Event) -> tuple[Json, ...]:
    return tuple(event.get(key) for key in ("event", "rank", "step"))


class _Mover(Reducer):
    """Reducer that replays recorded traces of another one."""

    def __init__(self, traffic: Traffic, reducer: Reducer) -> None:
        self._traffic, self.codec = traffic, getattr(reducer, "codec", None)
        self._begun: tuple[int, int] = (-1, 0)

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        del spec, seeds
        return CodecState()

    @override
    async def reduce(self, channel: Channel, slot: StateSlot, own: Contribution, *, step: int) -> Reduced:
        del slot
        number = self._begun[1] if self._begun[0] == step else 0
        self._begun = step, number + 1
        record = self._traffic.exchanges.get((step, number))
        if record is None:
            raise DataError(f"the run's traffic holds no exchange {number} of step {step}: simulate it again")
        for op in self._traffic.journeys[record.journeys[channel.rank]]:
            await _again(op, channel)
        metadata = torch.tensor(record.metadata, dtype=torch.float64)
        update_ops = self._traffic.learning(step, number)
        joint_ops = self._traffic.learning(step, number, together=True)
        return Reduced(
            own.tensor,
            record.weight,
            metadata,
            partial(_relearned, channel, update_ops) if record.learns else None,
            partial(_relearned, channel, joint_ops) if joint_ops else None,
        )


async def _again(op: Op, channel: Channel) -> None:
    """Replays one operation of a trace."""
    kind, *fields = op
    if kind == "whole":
        collective, dtype, numel, side = fields
        all_reduce = channel.collective(str(collective))
        await all_reduce(channel, _hollow(str(dtype), int(numel)), _hollow("float64", int(side)))
    elif kind == "compute":
        _compute(op, channel)
    elif kind == "hops":
        channel.hops(int(fields[0]))
    elif kind == "send":
        dst, hop, nbytes = map(int, fields)
        channel.send(Payload((_hollow("uint8", nbytes),)), dst, hop)
    else:
        src, hop = map(int, fields)
        await channel.recv(src, hop)


def _compute(op: Op, channel: Channel) -> None:
    _, operation, method, numel = op
    channel.compute(CodingCost(str(operation), str(method), int(numel)), lambda: None)


def _relearned(channel: Channel, ops: Sequence[Op], states: S) -> S:
    """Replays the computations of an update, and returns the states unchanged."""
    for op in ops:
        _compute(op, channel)
    return states


def _hollow(dtype: str, numel: int) -> Tensor:
    """Creates a tensor that has a size and no content."""
    return torch.empty(numel, dtype=getattr(torch, dtype), device="meta")


class _Hollow:
    """Workload whose samples have a number and no content."""

    name = "retimed"
    defaults: ClassVar[Mapping[str, Json]] = {}

    def __init__(self, workload: Workload) -> None:
        self._workload = workload

    def model(self, generator: torch.Generator) -> nn.Module:
        return self._workload.model(generator)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        del model
        return torch.zeros(len(batch))

    def metric(self, model: nn.Module, batch: Batch) -> Tensor:
        del model
        return torch.zeros(len(batch))

    def datasets(self) -> tuple[Dataset, Dataset]:
        train, test = self._workload.datasets()
        return _Numbers(train), _Numbers(test)


class _Numbers:
    """Data set whose samples have sizes and no content."""

    labels: Tensor | None = None

    def __init__(self, data: Dataset) -> None:
        self._count, first = len(data), data.rows(torch.tensor([0]))
        self._row = Batch(first.inputs.to("meta"), first.targets.to("meta"))

    def __len__(self) -> int:
        return self._count

    def rows(self, ids: SampleIds) -> Batch:
        inputs, targets = self._row.inputs, self._row.targets
        return Batch(inputs.expand(len(ids), *inputs.shape[1:]), targets.expand(len(ids), *targets.shape[1:]))

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        del train
        return rows

    def take(self, ids: SampleIds, *, train: bool) -> Batch:
        return self.prepare(self.rows(ids), train=train)


class _Unkept(Checkpoints):
    """Checkpoints that are not written."""

    def __init__(self) -> None:
        super().__init__(Path(), 0, 1, leader=False)

    @override
    def save(self, step: int, shared: State, own: State) -> Path:
        del shared, own
        return self.folder / f"step-{step:08d}"

    @override
    def prune(self) -> None:
        """Does nothing."""
