"""One exchange's share of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from torch import Tensor

from farflung.tasks import Pending, done
from farflung.types import AllReduce, CodingCost, Communicator, Counts, Payload, Runtime, Tag, TensorSpec

__all__ = [
    "KINDS",
    "RELAYED",
    "ExchangeChannel",
    "Purpose",
    "Started",
    "Values",
    "describe",
    "kind_of",
    "start",
    "step_of",
]

T = TypeVar("T")

_THROUGH = done(None)


class Purpose(IntEnum):
    """What an exchange is for; exchanges are numbered by purpose and step, so that no two ever meet."""

    STEP = 0
    DECISION = 1
    EVALUATION = 2
    CHECKPOINT = 3
    SHARING = 4
    START = 5
    FLUSH = 6
    REMAINDER = 7
    MEASURE = 8
    UNUSED = 9
    JOIN = 10
    MOMENTS = 11
    MEMBERS = 13
    ENCODING = 14
    OPERANDS = 15
    ANSWERS = 16
    VIEWS = 17
    ADOPTION = 18
    LEAVING = 19
    STATE = 20
    COMPARISON = 21
    STOP = 22

    def at(self, step: int) -> int:
        """The number of this purpose's exchange at one step."""
        return self << _STEP_BITS | step


_STEP_BITS = 56
_WORDS = {
    Purpose.STEP: "the exchange",
    Purpose.DECISION: "a decision",
    Purpose.EVALUATION: "averaging or scoring the model",
    Purpose.CHECKPOINT: "the checkpoint",
    Purpose.SHARING: "shared samples",
    Purpose.START: "the parameters to start from",
    Purpose.FLUSH: "averaging the model at the end",
    Purpose.REMAINDER: "the last counts",
    Purpose.MEASURE: "measuring the network",
    Purpose.UNUSED: "unused parameters",
    Purpose.JOIN: "the end of join()",
    Purpose.MOMENTS: "averaging the optimizer's state",
    Purpose.MEMBERS: "the registry of members",
    Purpose.ENCODING: "pieces of other devices' data",
    Purpose.OPERANDS: "what to multiply by",
    Purpose.ANSWERS: "products",
    Purpose.VIEWS: "the agreement on the next view",
    Purpose.ADOPTION: "the result of an exchange that another member holds",
    Purpose.LEAVING: "the end of the run",
    Purpose.STATE: "the state of the run",
    Purpose.COMPARISON: "comparing the replicas' parameters",
    Purpose.STOP: "the agreement on the last step",
}

KINDS = {
    Purpose.STEP: "gradients",
    Purpose.DECISION: "decisions",
    Purpose.EVALUATION: "evaluation",
    Purpose.CHECKPOINT: "checkpoint",
    Purpose.SHARING: "sharing",
    Purpose.START: "start",
    Purpose.FLUSH: "flush",
    Purpose.REMAINDER: "remainder",
    Purpose.MEASURE: "measuring",
    Purpose.UNUSED: "unused",
    Purpose.JOIN: "join",
    Purpose.MOMENTS: "moments",
    Purpose.MEMBERS: "members",
    Purpose.ENCODING: "encoding",
    Purpose.OPERANDS: "operands",
    Purpose.ANSWERS: "answers",
    Purpose.VIEWS: "views",
    Purpose.ADOPTION: "adoption",
    Purpose.LEAVING: "leaving",
    Purpose.STATE: "state",
    Purpose.COMPARISON: "comparison",
    Purpose.STOP: "stop",
}
"""What bytes sent for each purpose are counted as; ``gradients`` are whatever steps exchange, updates too."""
RELAYED = "relayed"
"""What bytes are counted as that a replica passes on between two others; these count them too, as what they are for."""
_BY_NUMBER: Mapping[int, str] = {int(purpose): kind for purpose, kind in KINDS.items()}


def kind_of(exchange: int) -> str:
    """What the bytes of an exchange are counted as: one of :data:`KINDS`, or ``other`` where it has no purpose."""
    return _BY_NUMBER.get(exchange >> _STEP_BITS, "other")


def step_of(exchange: int) -> int:
    """The step that :meth:`Purpose.at` has numbered an exchange by."""
    return exchange & ((1 << _STEP_BITS) - 1)


def of_no_view(exchange: int) -> bool:
    """Whether messages of an exchange outlive the view that they are sent in."""
    return exchange >> _STEP_BITS in (Purpose.VIEWS, Purpose.STATE)


def describe(tag: Tag) -> str:
    """Describes a message's purpose, step, part and hop, for errors.

    >>> describe(Tag(Purpose.EVALUATION.at(3), 1))
    'averaging or scoring the model at step 3, part 1, hop 0'
    """
    purpose, step = divmod(tag.exchange, 1 << _STEP_BITS)
    return f"{_WORDS[Purpose(purpose)]} at step {step}, part {tag.part}, hop {tag.hop}"


class ExchangeChannel:
    """Numbers the hops of one exchange and counts its bytes; see :class:`farflung.types.Channel`.

    Args:
      comm: the membership view's communicator.
      exchange: the exchange's number, from :meth:`Purpose.at`; alike on all ranks.
      part: which of the parts that this exchange moves.
    """

    def __init__(self, comm: Communicator, exchange: int, part: int) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.kind = kind_of(exchange)
        """What its bytes are counted as."""
        self.sent: Counts = np.zeros(comm.size, dtype=np.int64)
        """Payload bytes sent so far to each rank."""
        self._comm = comm
        self._exchange, self._part = exchange, part
        self._next_hop = 0
        self._lane = comm.lane

    @property
    def auto(self) -> Mapping[int, str]:
        return self._comm.auto

    @property
    def sent_nbytes(self) -> int:
        return int(self.sent.sum())

    def tag(self, hop: int) -> Tag:
        """Of this exchange and part."""
        return Tag(self._exchange, self._part, hop)

    def hops(self, count: int) -> int:
        """Reserves ``count`` consecutive hops; returns the first."""
        first = self._next_hop
        self._next_hop += count
        return first

    def compute(self, cost: CodingCost, fn: Callable[[], T]) -> T:
        """Runs ``fn`` now; a modelled device is charged for it."""
        if self._lane is not None:
            self._lane.charge(cost)
        return fn()

    def computed(self) -> Pending[None]:
        """Done when the modelled device is through with what was computed."""
        return _THROUGH if self._lane is None else self._lane.through()

    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]:
        """Sends, and counts the payload's bytes."""
        self.sent[dst] += payload.nbytes
        return self._comm.send(payload, dst, self.tag(hop))

    def count(self, nbytes: Counts) -> None:
        """Counts what goes past :meth:`send`."""
        self.sent += nbytes
        self._comm.sent.add(self.kind, nbytes)

    def recv(self, src: int, hop: int, expect: tuple[TensorSpec, ...] | None = None) -> Pending[Payload]:
        return self._comm.recv(src, self.tag(hop), expect)

    def land(self, src: int, hop: int, into: Tensor) -> None:
        self._comm.land(src, self.tag(hop), into)

    def collective(self, name: str) -> AllReduce:
        return self._comm.collective(name)

    def all_reduce(self, tensor: Tensor) -> Pending[Tensor]:
        """The backend's own sum; its bytes are modelled as a ring's, ``2 (n-1)/n`` of the tensor to the next rank."""
        modelled = np.zeros(self.size, dtype=np.int64)
        modelled[(self.rank + 1) % self.size] = 2 * (self.size - 1) * tensor.nbytes // self.size
        self.count(modelled)
        return self._comm.all_reduce(tensor, self.tag(self.hops(1)))


class Values(NamedTuple, Generic[T]):
    """How the result of an exchange travels to a member that lacks it.

    Args:
      pack: the result as tensors.
      unpack: the result from such tensors, which it may keep.
    """

    pack: Callable[[T], tuple[Tensor, ...]]
    unpack: Callable[[tuple[Tensor, ...]], T]


@dataclass(eq=False, slots=True)
class Started(Generic[T]):
    """An exchange that has been started.

    Args:
      channel: counts its bytes.
      result: what it brings.
    """

    channel: ExchangeChannel
    result: Pending[T]

    async def bring(self) -> T:
        """Wait for the result, at the same place of the program on all replicas."""
        return await self.result


def start(
    runtime: Runtime,
    number: int,
    part: int,
    make: Callable[[ExchangeChannel], Coroutine[Pending[Any], None, T]],
    values: Values[T],
    *,
    rewind: Callable[[], None] | None = None,
    ends_step: bool = False,
) -> Started[T]:
    """Start an exchange beside the replica, in the same order on all replicas.

    Where the run outlives the loss of members (:attr:`farflung.types.Runtime.elastic`), it may be made several times.

    Args:
      runtime: the world.
      number: of the exchange, from :meth:`Purpose.at`.
      part: which of the parts that this exchange moves.
      make: the exchange, on a channel; leaves what it needs untouched where the run is elastic.
      values: how its result travels.
      rewind: restores what ``make`` has changed, before it is made again.
      ends_step: whether all exchanges of a training step have been started with it.
    """
    if runtime.elastic is not None:
        started: Started[T] = runtime.elastic.start(
            number, part, make, values, rewind=rewind, ends_step=ends_step
        )
        return started
    channel = ExchangeChannel(runtime.comm, number, part)
    return Started(channel, runtime.launch(make(channel)))
