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
    CodingCost,
    Contribution,
    Json,
    Payload,
    Reduced,
    Reducer,
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
        super().__init__(path, fresh=True)
        self._size = size
        self._journeys: dict[tuple[Op, ...], int] = {}
        self._open: dict[tuple[int, int], dict[int, int]] = {}
        self._begun: dict[int, tuple[int, int]] = {}
        self._learned: dict[tuple[str, int], tuple[Op, ...]] = {}

    def begin(self, rank: int, step: int) -> int:
        """Counts an exchange that a rank begins, and returns how many it has begun before at this step."""
        latest_step, count = self._begun.get(rank, (step, 0))
        number = count if latest_step == step else 0
        self._begun[rank] = step, number + 1
        return number

    def end(self, rank: int, step: int, number: int, ops: tuple[Op, ...], result: Reduced) -> None:
        """Records a rank's completed exchange."""
        if ops not in self._journeys:
            self._journeys[ops] = len(self._journeys)
            self.add({"journey": self._journeys[ops], "ops": [list(op) for op in ops]})
        traces = self._open.setdefault((step, number), {})
        traces[rank] = self._journeys[ops]
        if len(traces) == self._size:
            del self._open[step, number]
            self.add(
                {
                    "step": step,
                    "number": number,
                    "journeys": [traces[rank] for rank in range(self._size)],
                    "weight": result.weight,
                    "metadata": result.metadata.tolist(),
                    "learns": result.learn is not None,
                }
            )

    def learned(self, together: bool, step: int, number: int, ops: tuple[Op, ...]) -> None:
        """Records a rank's update of the reducer state, from one exchange or jointly from all of a step."""
        kind = "learn_together" if together else "learn"
        if ops != self._learned.get((kind, number), ()):
            self._learned[kind, number] = ops
            self.add({"step": step, "number": number, kind: [list(op) for op in ops]})

    def filled(self, rank: int, step: int, order: list[int]) -> None:
        """Records the order in which a backward pass has filled its buckets."""
        if order != sorted(order):
            self.add({"step": step, "rank": rank, "fill": cast("list[Json]", order)})


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
            self.parts = replace(self.parts, reducer=_RecordingReducer(self.parts.reducer, self.recorder))
        Replica.__post_init__(self)

    @override
    def backward(self, loss: Tensor, ready: Callable[[int], None]) -> None:
        order: list[int] = []

        def record_ready(index: int) -> None:
            order.append(index)
            ready(index)

        Replica.backward(self, loss, record_ready)
        if self.recorder is not None:
            self.recorder.filled(self.runtime.comm.rank, self.step_done, order)


class _RecordingReducer(Reducer):
    """Reducer whose traces are recorded.

    Args:
      reducer: Reducer that does the work.
      recorder: Recorder of the traces.
    """

    def __init__(self, reducer: Reducer, recorder: TrafficRecorder) -> None:
        self._reducer, self._recorder = reducer, recorder
        self.codec = getattr(reducer, "codec", None)

    @override
    def check(self, specs: Sequence[TensorSpec], steps: int | None = None) -> None:
        self._reducer.check(specs, steps)

    @override
    def report(self, states: Sequence[State]) -> Mapping[str, Json]:
        return self._reducer.report(states)

    @override
    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        return self._reducer.init(spec, seeds)

    @override
    async def reduce(self, channel: Channel, slot: StateSlot, own: Contribution, *, step: int) -> Reduced:
        number = self._recorder.begin(channel.rank, step)
        proxy = _WatchedChannel(channel)
        result = await self._reducer.reduce(cast(Channel, proxy), slot, own, step=step)
        self._recorder.end(channel.rank, step, number, proxy.taken(), result)
        update, joint_update = result.learn, result.learn_together
        if update is not None:
            result = replace(result, learn=self._kept(update, proxy, False, step, number))
        if joint_update is not None:
            result = replace(result, learn_together=self._kept(joint_update, proxy, True, step, number))
        return result

    def _kept(
        self, learn: Callable[[S], S], watched: _WatchedChannel, together: bool, step: int, number: int
    ) -> Callable[[S], S]:
        """Wraps an update so that the cost is recorded."""

        def record_update(states: S) -> S:
            new_states = learn(states)
            self._recorder.learned(together, step, number, watched.taken())
            return new_states

        return record_update


class _WatchedChannel:
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

    def taken(self) -> tuple[Op, ...]:
        """Returns the operations since the last call."""
        ops, self._ops = tuple(self._ops), []
        return ops

    def hops(self, count: int) -> int:
        if count:
            self._ops.append(("hops", count))
        return self._channel.hops(count)

    def compute(self, cost: CodingCost, fn: Callable[[], T]) -> T:
        self._ops.append(("compute", *cost))
        return self._channel.compute(cost, fn)

    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]:
        self._ops.append(("send", dst, hop, payload.nbytes))
        return self._channel.send(payload, dst, hop)

    def recv(self, src: int, hop: int, expect: tuple[TensorSpec, ...] | None = None) -> Pending[Payload]:
        if src is None:
            raise Unsupported("the traffic of an exchange that takes the first arrival cannot be recorded")
        self._ops.append(("recv", src, hop))
        return self._channel.recv(src, hop, expect)

    def collective(self, name: str) -> AllReduce:
        inner = self._channel.collective(name)

        async def record_collective(
            channel: Channel, tensor: Tensor, side: Tensor, *, coding: SegmentCoding | None = None
        ) -> tuple[Tensor, Tensor]:
            if coding is not None:
                return await inner(channel, tensor, side, coding=coding)
            self._ops.append(
                ("whole", name, str(tensor.dtype).removeprefix("torch."), tensor.numel(), side.numel())
            )
            return await inner(self._channel, tensor, side)

        return record_collective
