"""Channel: one exchange's share of a communicator."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from torch import Tensor

from farflung.tasks import Pending, create_completed
from farflung.types import Counts, Group, Payload, Runtime, Tag, TensorSpec

__all__ = [
    "PURPOSES",
    "RELAYED_KIND",
    "ExchangeChannel",
    "ExchangeHandle",
    "Purpose",
    "PurposeBase",
    "ResultCodec",
    "describe_tag",
    "get_exchange_kind",
    "get_exchange_step",
    "start_exchange",
]

T = TypeVar("T")

_COMPLETED = create_completed(None)
_STEP_BITS = 56
PHASE_PRIORITY = 2
"""Priority that messages lose with each phase of an exchange, our choice.

If replies went before all first messages of less urgent exchanges, the last of these would find the network idle.
"""


class PurposeBase(IntEnum):
    """Purpose of an exchange; exchanges are numbered by purpose and step, so their messages never mix.

    Each member has a number, the ``kind`` that its bytes are counted as, and ``words`` for errors.
    """

    kind: str
    words: str

    def __new__(cls, number: int, kind: str, words: str) -> Self:
        """Creates an integer with two attributes."""
        purpose = int.__new__(cls, number)
        purpose._value_, purpose.kind, purpose.words = number, kind, words
        return purpose

    def build_exchange_id(self, step: int) -> int:
        """Returns the number of this purpose's exchange at one step."""
        return self << _STEP_BITS | step


class Purpose(PurposeBase):
    """Purpose of an exchange between replicas.

    ``gradients`` are the tensors that steps exchange, including updates. Coded training has numbers 13 to 16.
    """

    STEP = 0, "gradients", "the exchange"
    DECISION = 1, "decisions", "a decision"
    EVALUATION = 2, "evaluation", "averaging or scoring the model"
    CHECKPOINT = 3, "checkpoint", "the checkpoint"
    SHARING = 4, "sharing", "shared samples"
    START = 5, "start", "the parameters to start from"
    FLUSH = 6, "flush", "averaging the model at the end"
    REMAINDER = 7, "remainder", "the last counts"
    MEASURE = 8, "measuring", "measuring the network"
    UNUSED = 9, "unused", "unused parameters"
    UNEVEN_INPUTS = 10, "join", "the end of join()"
    MOMENTS = 11, "moments", "averaging the optimizer's state"
    VIEWS = 17, "views", "the agreement on the next view"
    ADOPTION = 18, "adoption", "the result of an exchange that another member holds"
    LEAVING = 19, "leaving", "the end of the run"
    STATE = 20, "state", "the state of the run"
    COMPARISON = 21, "comparison", "comparing the replicas' parameters"
    STOP = 22, "stop", "the agreement on the last step"


RELAYED_KIND = "relayed"
"""Kind of the bytes that a replica relays between two others, which also count them by their purpose."""
PURPOSES: dict[int, PurposeBase] = {int(purpose): purpose for purpose in Purpose}
"""Purposes by number; a package may add its own."""


def get_exchange_kind(exchange: int) -> str:
    """Returns the kind that the bytes of an exchange are counted as; ``other`` if it has no purpose."""
    purpose = PURPOSES.get(exchange >> _STEP_BITS)
    return "other" if purpose is None else purpose.kind


def get_exchange_step(exchange: int) -> int:
    """Returns the step of an exchange's number; see :meth:`Purpose.build_exchange_id`."""
    return exchange & ((1 << _STEP_BITS) - 1)


def is_control_plane(exchange: int) -> bool:
    """Returns True if messages of an exchange outlive the view in which they are sent."""
    return exchange >> _STEP_BITS in (Purpose.VIEWS, Purpose.STATE)


def describe_tag(tag: Tag) -> str:
    """Describes a message's purpose, step, part and hop, for errors.

    >>> describe_tag(Tag(Purpose.EVALUATION.build_exchange_id(3), 1))
    'averaging or scoring the model at step 3, part 1, hop 0'
    """
    purpose, step = divmod(tag.exchange, 1 << _STEP_BITS)
    return f"{PURPOSES[purpose].words} at step {step}, part {tag.part}, hop {tag.hop}"


class ExchangeChannel:
    """Channel of one exchange: numbers its hops and counts its bytes; see :class:`farflung.types.Channel`.

    Args:
      comm: Communicator of the ranks that take part.
      exchange: Number of the exchange, from :meth:`Purpose.build_exchange_id`; equal on all ranks.
      part: Number of the part that this exchange moves.
      priority: Priority of its messages; ``None``: they leave in order.
    """

    def __init__(self, comm: Group, exchange: int, part: int, priority: int | None = None) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.kind = get_exchange_kind(exchange)
        """Kind that its bytes are counted as."""
        self.sent_counts: Counts = np.zeros(comm.size, dtype=np.int64)
        """Payload bytes sent so far to each rank."""
        self._comm = comm
        self._exchange, self._part, self._priority = exchange, part, priority
        self._num_hops = 0
        self._first_hops: list[int] = []
        """First hop of each reservation."""
        self._coding_processor = comm.coding_processor
        self.get_collective = comm.get_collective

    @property
    def sent_nbytes(self) -> int:
        return int(self.sent_counts.sum())

    def get_tag(self, hop: int) -> Tag:
        """Returns the tag of a hop."""
        return Tag(self._exchange, self._part, hop)

    def reserve_hops(self, count: int) -> int:
        """Reserves ``count`` consecutive hops, a phase of the exchange; returns the first."""
        first = self._num_hops
        self._first_hops.append(first)
        self._num_hops += count
        return first

    def charge(self, operation: str, numel: int, method: str = "") -> None:
        """Charges a modelled device for the arithmetic that follows."""
        if self._coding_processor is not None:
            self._coding_processor.charge(operation, numel, method)

    def wait_computed(self) -> Pending[None]:
        """Completes when the modelled device has finished all computations."""
        return _COMPLETED if self._coding_processor is None else self._coding_processor.wait_idle()

    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]:
        """Sends a payload and counts its bytes."""
        self.sent_counts[dst] += payload.nbytes
        priority = 0
        if self._priority is not None:
            priority = self._priority + PHASE_PRIORITY * (bisect_right(self._first_hops, hop) - 1)
        return self._comm.send(payload, dst, self.get_tag(hop), priority)

    def count_sent(self, nbytes: Counts) -> None:
        """Counts bytes that bypass :meth:`send`."""
        self.sent_counts += nbytes
        self._comm.sent_bytes.add(self.kind, nbytes)

    def recv(self, src: int, hop: int, expect: tuple[TensorSpec, ...] | None = None) -> Pending[Payload]:
        return self._comm.recv(src, self.get_tag(hop), expect)

    def post_recv_buffer(self, src: int, hop: int, buffer: Tensor) -> None:
        self._comm.post_recv_buffer(src, self.get_tag(hop), buffer)

    def all_reduce(self, tensor: Tensor) -> Pending[Tensor]:
        """Sums by the backend; models its bytes as a ring's, ``2 (n-1)/n`` of the tensor to the next rank."""
        modelled = np.zeros(self.size, dtype=np.int64)
        modelled[(self.rank + 1) % self.size] = 2 * (self.size - 1) * tensor.nbytes // self.size
        self.count_sent(modelled)
        return self._comm.all_reduce(tensor, self.get_tag(self.reserve_hops(1)))


class ResultCodec(NamedTuple, Generic[T]):
    """Codec of an exchange's result, for a member that lacks it.

    Args:
      pack: Converts the result to tensors.
      unpack: Converts such tensors, which it may keep, to the result.
    """

    pack: Callable[[T], tuple[Tensor, ...]]
    unpack: Callable[[tuple[Tensor, ...]], T]


@dataclass(eq=False, slots=True)
class ExchangeHandle(Generic[T]):
    """Handle of a running exchange.

    Args:
      channel: Channel that counts its bytes.
      result: Result of the exchange.
    """

    channel: ExchangeChannel
    result: Pending[T]

    async def wait(self) -> T:
        """Waits for the result, at the same place of the program on all replicas."""
        return await self.result


def start_exchange(
    runtime: Runtime,
    number: int,
    part: int,
    make: Callable[[ExchangeChannel], Coroutine[Pending[Any], None, T]],
    result_codec: ResultCodec[T],
    *,
    rewind: Callable[[], None] | None = None,
    is_last_of_step: bool = False,
    priority: int | None = None,
) -> ExchangeHandle[T]:
    """Starts an exchange in the background, in the same order on all replicas.

    If the run outlives the loss of members (:attr:`farflung.types.Runtime.elastic`), it may be built several times.

    Args:
      runtime: Runtime of the replica.
      number: Number of the exchange, from :meth:`Purpose.build_exchange_id`.
      part: Number of the part that this exchange moves.
      make: Builds the exchange on a channel; must not modify its inputs in an elastic run.
      result_codec: Codec of its result.
      rewind: Restores what ``make`` has changed, before the exchange is built again.
      is_last_of_step: True if this is the last exchange of a training step.
      priority: Priority of its messages, see :class:`ExchangeChannel`; ignored in an elastic run.
    """
    if runtime.elastic is not None:
        started: ExchangeHandle[T] = runtime.elastic.start(
            number, part, make, result_codec, rewind=rewind, is_last_of_step=is_last_of_step
        )
        return started
    channel = ExchangeChannel(runtime.comm, number, part, priority)
    return ExchangeHandle(channel, runtime.launch(make(channel)))
