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
from farflung.sim.traffic import Op, RecordedTraffic
from farflung.telemetry import BYTE_FIELDS, TIME_FIELDS, Event, Sink
from farflung.types import (
    Batch,
    Channel,
    CodecState,
    Contribution,
    Dataset,
    ForwardTrace,
    Json,
    Payload,
    Reducer,
    ReduceResult,
    SampleIds,
    ScoreKind,
    Seeds,
    State,
    StateSlot,
    TensorSpec,
    Workload,
)

__all__ = ["RetimedReplica", "build_retimed_sink"]

S = TypeVar("S")


@dataclass(slots=True)
class RetimedReplica(Replica):
    """Replica that draws batches and sends what a run has sent, and computes nothing.

    Args:
      traffic: Traffic of the run.
      has_checkpoints: The run wrote checkpoints; all replicas then wait for each other at these steps.
    """

    traffic: RecordedTraffic = field(default_factory=RecordedTraffic)
    has_checkpoints: bool = True

    @override
    def __post_init__(self) -> None:
        self.workload = _StubWorkload(self.workload)
        self.components = replace(
            self.components, reducer=_ReplayReducer(self.traffic, self.components.reducer)
        )
        self.checkpoints = _NullCheckpoints() if self.has_checkpoints else None
        Replica.__post_init__(self)

    @override
    def _trace_forward(self, workload: Workload) -> ForwardTrace:
        assert isinstance(workload, _StubWorkload)
        return Replica._trace_forward(self, workload.original)

    @override
    def compute_scaled_loss(self, batch: Batch, weights: Tensor | None) -> tuple[Tensor, StepMetadata]:
        del weights
        return torch.zeros(()), StepMetadata(0.0, self.batch_loader.compute_weight(len(batch)), len(batch))

    @override
    def build_scorer(self, kind: ScoreKind) -> Callable[[SampleIds], Tensor]:
        return lambda ids: torch.ones(len(ids))

    @override
    def build_loss_fn(self) -> Callable[[SampleIds], Tensor]:
        return lambda ids: torch.full((len(ids),), math.nan)

    @override
    def backward(self, loss: Tensor, ready: Callable[[int], None]) -> None:
        del loss
        rank, buckets = self.runtime.comm.rank, range(len(self.buckets.buckets))
        order = self.traffic.fills.get((self.completed_steps, rank), buckets)
        if sorted(order) != [*buckets]:
            raise DataError(f"the run's traffic has no order of {len(buckets)} buckets: simulate it again")
        for index in order:
            ready(index)

    @override
    def update(self) -> None:
        """Does nothing."""


def build_retimed_sink(stored_events: Sequence[Event], *sinks: Sink) -> Sink:
    """Builds a sink for one retimed replica, which changes only times and bytes of the stored events.

    Args:
      stored_events: Events of the same replica in the run.
      sinks: Sinks that receive the events.

    Raises:
      DataError: The replica emits another event than it did in the run.
    """
    # By key: an evaluation is reported when all ranks have reached it, which may be steps later.
    expected: dict[tuple[Json, ...], deque[Event]] = {}
    for event in stored_events:
        expected.setdefault(_get_key(event), deque()).append(event)

    def emit_retimed(event: Event) -> None:
        queue = expected.get(_get_key(event))
        if not queue or not (TIME_FIELDS | BYTE_FIELDS) & queue[0].keys() <= event.keys():
            raise DataError(
                f"the run's events and its traffic differ at {event['event']} of rank {event['rank']}: "
                "simulate it again"
            )
        stored_event = queue.popleft()
        result: Event = {
            key: event[key] if key in TIME_FIELDS | BYTE_FIELDS else value
            for key, value in stored_event.items()
        }
        for target in sinks:
            target(result)

    return emit_retimed


def _get_key(event: Event) -> tuple[Json, ...]:
    return tuple(event.get(key) for key in ("event", "rank", "step"))


class _ReplayReducer(Reducer):
    """Reducer that replays recorded operations of another one."""

    def __init__(self, traffic: RecordedTraffic, reducer: Reducer) -> None:
        self._traffic, self.codec = traffic, getattr(reducer, "codec", None)
        self._exchange_count: tuple[int, int] = (-1, 0)

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        del spec, seeds
        return CodecState()

    @override
    async def reduce(
        self, channel: Channel, slot: StateSlot, contribution: Contribution, *, step: int
    ) -> ReduceResult:
        del slot
        number = self._exchange_count[1] if self._exchange_count[0] == step else 0
        self._exchange_count = step, number + 1
        record = self._traffic.exchanges.get((step, number))
        if record is None:
            raise DataError(f"the run's traffic holds no exchange {number} of step {step}: simulate it again")
        for op in self._traffic.op_lists[record.op_list_numbers[channel.rank]]:
            await _replay_op(op, channel)
        metadata = torch.tensor(record.metadata, dtype=torch.float64)
        update_ops = self._traffic.find_update(step, number)
        joint_ops = self._traffic.find_update(step, number, is_joint=True)
        return ReduceResult(
            contribution.tensor,
            record.weight,
            metadata,
            partial(_replay_update, channel, update_ops) if record.has_update else None,
            partial(_replay_update, channel, joint_ops) if joint_ops else None,
        )


async def _replay_op(op: Op, channel: Channel) -> None:
    """Replays one operation."""
    kind, *fields = op
    if kind == "collective":
        collective, dtype, numel, side = fields
        all_reduce = channel.get_collective(str(collective))
        await all_reduce(
            channel, _create_stub_tensor(str(dtype), int(numel)), _create_stub_tensor("float64", int(side))
        )
    elif kind == "compute":
        _charge(op, channel)
    elif kind == "hops":
        channel.reserve_hops(int(fields[0]))
    elif kind == "send":
        dst, hop, nbytes = map(int, fields)
        channel.send(Payload((_create_stub_tensor("uint8", nbytes),)), dst, hop)
    else:
        src, hop = map(int, fields)
        await channel.recv(src, hop)


def _charge(op: Op, channel: Channel) -> None:
    _, operation, method, numel = op
    channel.charge(str(operation), int(numel), str(method))


def _replay_update(channel: Channel, ops: Sequence[Op], states: S) -> S:
    """Replays the computations of an update, and returns the states unchanged."""
    for op in ops:
        _charge(op, channel)
    return states


def _create_stub_tensor(dtype: str, numel: int) -> Tensor:
    """Creates a tensor that has a size and no content."""
    return torch.empty(numel, dtype=getattr(torch, dtype), device="meta")


class _StubWorkload:
    """Workload whose samples have a number and no content."""

    name = "retimed"
    defaults: ClassVar[Mapping[str, Json]] = {}

    def __init__(self, workload: Workload) -> None:
        self.original = workload

    def build_model(self, generator: torch.Generator) -> nn.Module:
        return self.original.build_model(generator)

    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        del model
        return torch.zeros(len(batch))

    def compute_metrics(self, model: nn.Module, batch: Batch) -> Tensor:
        del model
        return torch.zeros(len(batch))

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        train, test = self.original.load_datasets()
        return _StubDataset(train), _StubDataset(test)


class _StubDataset:
    """Data set whose samples have sizes and no content."""

    labels: Tensor | None = None

    def __init__(self, data: Dataset) -> None:
        self._num_samples, first = len(data), data.get_rows(torch.tensor([0]))
        self._row = Batch(first.inputs.to("meta"), first.targets.to("meta"))

    def __len__(self) -> int:
        return self._num_samples

    def get_rows(self, ids: SampleIds) -> Batch:
        inputs, targets = self._row.inputs, self._row.targets
        return Batch(inputs.expand(len(ids), *inputs.shape[1:]), targets.expand(len(ids), *targets.shape[1:]))

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        del train
        return rows

    def take(self, ids: SampleIds, *, train: bool) -> Batch:
        return self.prepare(self.get_rows(ids), train=train)


class _NullCheckpoints(Checkpoints):
    """Checkpoints that are not written."""

    def __init__(self) -> None:
        super().__init__(Path(), 0, 1, is_leader=False)

    @override
    def save(self, step: int, shared_state: State, replica_state: State) -> Path:
        del shared_state, replica_state
        return self.folder / f"step-{step:08d}"

    @override
    def prune(self) -> None:
        """Does nothing."""
