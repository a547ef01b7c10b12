"""Recorder of a run's traffic; see :mod:`farflung.sim.traffic`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from torch import Tensor
from typing_extensions import override

from farflung.errors import Unsupported
from farflung.files import JsonLinesFile
from farflung.loop import Replica
from farflung.sim.traffic import Op
from farflung.tasks import Pending
from farflung.types import (
    AllReduce,
    Channel,
    CodecState,
    Contribution,
    Json,
    Payload,
    Reducer,
    ReduceResult,
    Seeds,
    SegmentCoding,
    State,
    StateSlot,
    TensorSpec,
)

__all__ = ["RecordedReplica", "TrafficRecorder"]


S = TypeVar("S")
T = TypeVar("T")


class TrafficRecorder(JsonLinesFile):
    """Writer of a run's traffic; nothing is written twice.

    Args:
      path: File, which is replaced.
      size: Number of ranks.

    Raises:
      StorageError: The file cannot be written; raised at construction or at any call.
    """

    def __init__(self, path: Path, size: int) -> None:
        super().__init__(path, should_overwrite=True)
        self._size = size
        self._op_lists: dict[tuple[Op, ...], int] = {}
        self._pending_exchanges: dict[tuple[int, int], dict[int, int]] = {}
        self._exchange_counts: dict[int, tuple[int, int]] = {}
        self._update_ops: dict[tuple[str, int], tuple[Op, ...]] = {}

    def begin_exchange(self, rank: int, step: int) -> int:
        """Counts an exchange that a rank begins, and returns how many it has begun before at this step."""
        latest_step, count = self._exchange_counts.get(rank, (step, 0))
        number = count if latest_step == step else 0
        self._exchange_counts[rank] = step, number + 1
        return number

    def end_exchange(
        self, rank: int, step: int, number: int, ops: tuple[Op, ...], result: ReduceResult
    ) -> None:
        """Records a rank's completed exchange."""
        if ops not in self._op_lists:
            self._op_lists[ops] = len(self._op_lists)
            self.add({"op_list": self._op_lists[ops], "ops": [list(op) for op in ops]})
        op_list_numbers = self._pending_exchanges.setdefault((step, number), {})
        op_list_numbers[rank] = self._op_lists[ops]
        if len(op_list_numbers) == self._size:
            del self._pending_exchanges[step, number]
            self.add(
                {
                    "step": step,
                    "number": number,
                    "op_lists": [op_list_numbers[rank] for rank in range(self._size)],
                    "weight": result.weight,
                    "metadata": result.metadata.tolist(),
                    "has_update": result.update_state is not None,
                }
            )

    def record_update(self, is_joint: bool, step: int, number: int, ops: tuple[Op, ...]) -> None:
        """Records a rank's update of the reducer state, from one exchange or jointly from all of a step."""
        kind = "joint_update" if is_joint else "update"
        if ops != self._update_ops.get((kind, number), ()):
            self._update_ops[kind, number] = ops
            self.add({"step": step, "number": number, kind: [list(op) for op in ops]})

    def record_fill(self, rank: int, step: int, order: list[int]) -> None:
        """Records the order in which a backward pass has filled its buckets."""
        if order != sorted(order):
            self.add({"step": step, "rank": rank, "bucket_order": cast("list[Json]", order)})


@dataclass(slots=True)
class RecordedReplica(Replica):
    """Replica whose traffic is recorded.

    Args:
      recorder: Recorder of the traffic.
    """

    recorder: TrafficRecorder | None = None

    @override
    def __post_init__(self) -> None:
        if self.recorder is not None:
            self.components = replace(
                self.components, reducer=_RecordingReducer(self.components.reducer, self.recorder)
            )
        Replica.__post_init__(self)

    @override
    def backward(self, loss: Tensor, ready: Callable[[int], None]) -> None:
        order: list[int] = []

        def record_ready(index: int) -> None:
            order.append(index)
            ready(index)

        Replica.backward(self, loss, record_ready)
        if self.recorder is not None:
            self.recorder.record_fill(self.runtime.comm.rank, self.completed_steps, order)


class _RecordingReducer(Reducer):
    """Reducer whose operations are recorded.

    Args:
      reducer: Reducer that does the work.
      recorder: Recorder of the operations.
    """

    def __init__(self, reducer: Reducer, recorder: TrafficRecorder) -> None:
        self._reducer, self._recorder = reducer, recorder
        self.codec = getattr(reducer, "codec", None)

    @override
    def check(self, specs: Sequence[TensorSpec], steps: int | None = None) -> None:
        self._reducer.check(specs, steps)

    @override
    def report(self, shared_states: Sequence[State]) -> Mapping[str, Json]:
        return self._reducer.report(shared_states)

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        return self._reducer.init(spec, seeds)

    @override
    async def reduce(
        self, channel: Channel, slot: StateSlot, contribution: Contribution, *, step: int
    ) -> ReduceResult:
        number = self._recorder.begin_exchange(channel.rank, step)
        proxy = _RecordingChannel(channel)
        result = await self._reducer.reduce(cast(Channel, proxy), slot, contribution, step=step)
        self._recorder.end_exchange(channel.rank, step, number, proxy.take_ops(), result)
        update, joint_update = result.update_state, result.update_all_states
        if update is not None:
            result = replace(result, update_state=self._wrap_update(update, proxy, False, step, number))
        if joint_update is not None:
            result = replace(
                result, update_all_states=self._wrap_update(joint_update, proxy, True, step, number)
            )
        return result

    def _wrap_update(
        self,
        update: Callable[[S], S],
        channel: _RecordingChannel,
        is_joint: bool,
        step: int,
        exchange_index: int,
    ) -> Callable[[S], S]:
        """Wraps an update of the reducer state so that its operations are recorded for an exchange."""

        def record_update(states: S) -> S:
            new_states = update(states)
            self._recorder.record_update(is_joint, step, exchange_index, channel.take_ops())
            return new_states

        return record_update


class _RecordingChannel:
    """Channel that records its operations.

    A collective without a codec is recorded as one operation by its requested name, such as ``auto``. Its messages
    may depend on the network and on when the ranks join. Its computations are not recorded then. All others are, even
    if the device has no rate for them.
    """

    def __init__(self, channel: Channel) -> None:
        self._ops: list[Op] = []
        self._channel = channel

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    def take_ops(self) -> tuple[Op, ...]:
        """Returns the operations since the last call."""
        ops, self._ops = tuple(self._ops), []
        return ops

    def reserve_hops(self, count: int) -> int:
        if count:
            self._ops.append(("hops", count))
        return self._channel.reserve_hops(count)

    def charge(self, operation: str, numel: int, method: str = "") -> None:
        self._ops.append(("compute", operation, method, numel))
        self._channel.charge(operation, numel, method)

    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]:
        self._ops.append(("send", dst, hop, payload.nbytes))
        return self._channel.send(payload, dst, hop)

    def recv(self, src: int, hop: int, expect: tuple[TensorSpec, ...] | None = None) -> Pending[Payload]:
        if src is None:
            raise Unsupported("the traffic of an exchange that takes the first arrival cannot be recorded")
        self._ops.append(("recv", src, hop))
        return self._channel.recv(src, hop, expect)

    def get_collective(self, name: str) -> AllReduce:
        inner = self._channel.get_collective(name)

        async def record_collective(
            channel: Channel, tensor: Tensor, metadata: Tensor, *, coding: SegmentCoding | None = None
        ) -> tuple[Tensor, Tensor]:
            if coding is not None:
                return await inner(channel, tensor, metadata, coding=coding)
            self._ops.append(
                (
                    "collective",
                    name,
                    str(tensor.dtype).removeprefix("torch."),
                    tensor.numel(),
                    metadata.numel(),
                )
            )
            return await inner(self._channel, tensor, metadata)

        return record_collective
