"""One exchange's share of a communicator."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, cast

from torch import Tensor

from farflung.tasks import Pending
from farflung.types import Communicator, Feature, Payload, Tag, TensorSpec

__all__ = ["ExchangeChannel", "InOne", "Purpose", "Shortcut"]


@dataclass(frozen=True, slots=True)
class InOne:
    """A collective that a communicator computes as a whole.

    Args:
      result: the sums of tensor and side.
      nbytes: what this rank sends.
      hops: how many the collective has.
    """

    result: Pending[tuple[Tensor, Tensor]]
    nbytes: int
    hops: int


class Shortcut(Protocol):
    """A communicator that knows its network, and may compute a collective as a whole: same times, bytes and bits."""

    def in_one(self, collective: str, tensor: Tensor, side: Tensor, encoded: bool, tag: Tag) -> InOne | None:
        """Joins a collective; ``None``: it has to go hop by hop.

        Args:
          collective: its name.
          tensor: given away, as to the collective.
          side: the same.
          encoded: whether a codec is inside.
          tag: of its first hop.
        """
        ...

    def fastest(self, collectives: tuple[str, ...], nbytes: int, side_nbytes: int) -> str:
        """The collective that takes the least time on its network, by the model."""
        ...


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

    def at(self, step: int) -> int:
        """The number of this purpose's exchange at one step."""
        return self << 56 | step


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
        self.features: frozenset[Feature] = comm.features
        self.sent_nbytes = 0
        self._comm = comm
        self._shortcut: Shortcut | None = cast(Shortcut, comm) if hasattr(comm, "in_one") else None
        self._exchange, self._part = exchange, part
        self._next_hop = 0

    def hops(self, count: int) -> int:
        """Reserves ``count`` consecutive hops; returns the first."""
        first = self._next_hop
        self._next_hop += count
        return first

    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]:
        """Sends, and counts the payload's bytes."""
        self.sent_nbytes += payload.nbytes
        return self._comm.send(payload, dst, Tag(self._exchange, self._part, hop))

    def recv(
        self, src: int | None, hop: int, expect: tuple[TensorSpec, ...] | None = None
    ) -> Pending[Payload]:
        """Receives."""
        return self._comm.recv(src, Tag(self._exchange, self._part, hop), expect)

    def in_one(
        self, collective: str, tensor: Tensor, side: Tensor, *, encoded: bool
    ) -> Pending[tuple[Tensor, Tensor]] | None:
        """The whole of a collective, where the communicator can; ``None``: go hop by hop."""
        if self._shortcut is None:
            return None
        tag = Tag(self._exchange, self._part, self._next_hop)
        whole = self._shortcut.in_one(collective, tensor, side, encoded, tag)
        if whole is None:
            return None
        self._next_hop += whole.hops
        self.sent_nbytes += whole.nbytes
        return whole.result

    def fastest(self, collectives: tuple[str, ...], nbytes: int, side_nbytes: int) -> str:
        """Which collective the communicator takes to be fastest; the first where it does not know its network."""
        if self._shortcut is None:
            return collectives[0]
        return self._shortcut.fastest(collectives, nbytes, side_nbytes)

    def all_reduce(self, tensor: Tensor) -> Pending[Tensor]:
        """The backend's own sum; its bytes are modelled as a ring's, ``2 (n-1)/n`` of the tensor."""
        self.sent_nbytes += 2 * (self.size - 1) * tensor.nbytes // self.size
        return self._comm.all_reduce(tensor, Tag(self._exchange, self._part, self.hops(1)))
