"""One exchange's share of a communicator."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np
from torch import Tensor

from farflung.tasks import Pending, done
from farflung.types import AllReduce, CodingCost, Counts, Group, Payload, Runtime, Tag, TensorSpec

__all__ = [
    "PURPOSES",
    "RELAYED",
    "ExchangeChannel",
    "Purpose",
    "PurposeBase",
    "Started",
    "Values",
    "describe",
    "kind_of",
    "start",
    "step_of",
]

T = TypeVar("T")

_THROUGH = done(None)
_STEP_BITS = 56


class PurposeBase(IntEnum):
    """What exchanges are for; exchanges are numbered by purpose and step, so that no two ever meet.

    Each member has a number, the ``kind`` that its bytes are counted as, and ``words`` for errors.
    """

    kind: str
    words: str

    def __new__(cls, number: int, kind: str, words: str) -> Self:
        """Makes an integer with two attributes."""
        purpose = int.__new__(cls, number)
        purpose._value_, purpose.kind, purpose.words = number, kind, words
        return purpose

    def at(self, step: int) -> int:
        """The number of this purpose's exchange at one step."""
        return self << _STEP_BITS | step


class Purpose(PurposeBase):
    """What the exchanges of replicas are for.

    ``gradients`` are whatever steps exchange, updates too. Coded training has numbers 13 to 16.
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
    JOIN = 10, "join", "the end of join()"
    MOMENTS = 11, "moments", "averaging the optimizer's state"
    VIEWS = 17, "views", "the agreement on the next view"
    ADOPTION = 18, "adoption", "the result of an exchange that another member holds"
    LEAVING = 19, "leaving", "the end of the run"
    STATE = 20, "state", "the state of the run"
    COMPARISON = 21, "comparison", "comparing the replicas' parameters"
    STOP = 22, "stop", "the agreement on the last step"


RELAYED = "relayed"
"""What bytes are counted as that a replica passes on between two others; these count them too, as what they are for."""
PURPOSES: dict[int, PurposeBase] = {int(purpose): purpose for purpose in Purpose}
"""All purposes by number; a package with purposes of its own adds them."""


def kind_of(exchange: int) -> str:
    """What the bytes of an exchange are counted as: the kind of its purpose, or ``other`` where it has none."""
    purpose = PURPOSES.get(exchange >> _STEP_BITS)
    return "other" if purpose is None else purpose.kind


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
    return f"{PURPOSES[purpose].words} at step {step}, part {tag.part}, hop {tag.hop}"


class ExchangeChannel:
    """Numbers the hops of one exchange and counts its bytes; see :class:`farflung.types.Channel`.

    Args:
      comm: the ranks that take part.
      exchange: the exchange's number, from :meth:`Purpose.at`; alike on all ranks.
      part: which of the parts that this exchange moves.
    """

    def __init__(self, comm: Group, exchange: int, part: int) -> None:
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
        """Waits for the result, at the same place of the program on all replicas."""
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
    """Starts an exchange beside the replica, in the same order on all replicas.

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
