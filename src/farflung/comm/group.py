"""Communicators of one member: the half that both worlds share, and that of real processes."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

from torch import Tensor
from typing_extensions import override

from farflung.comm.collectives import collective_named
from farflung.comm.mailbox import Mailbox
from farflung.comm.view import View
from farflung.tasks import Pending
from farflung.types import AllReduce, Payload, Sent, Tag, TensorSpec

__all__ = ["Group", "WallCommunicator"]


class Group(ABC):
    """Half of a :class:`farflung.types.Communicator` that receives messages and counts sent bytes.

    Args:
      mailbox: Mailbox of the member.
      rank: Rank of the member.
      size: Number of ranks.
      sent_bytes: Bytes sent so far.
    """

    def __init__(self, mailbox: Mailbox, rank: int, size: int, sent: Sent) -> None:
        self.rank, self.size, self.sent = rank, size, sent
        self.auto: Mapping[int, str] = {}
        self._mailbox = mailbox
        self.land, self.forget, self.advance = mailbox.land, mailbox.forget, mailbox.advance
        self.arrival, self.departure = mailbox.arrivals.next, mailbox.departures.next

    @abstractmethod
    def _begin_wait(self, deadline_s: float | None) -> float:
        """Returns the time at which a wait begins, with an optional deadline of its own."""

    def recv(
        self,
        src: int,
        tag: Tag,
        expect: tuple[TensorSpec, ...] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Pending[Payload]:
        return self._mailbox.recv(src, tag, expect, self._begin_wait(deadline_s), deadline_s)

    def recv_any(
        self, tag: Tag, expect: tuple[TensorSpec, ...] | None = None, *, deadline_s: float | None = None
    ) -> Pending[tuple[int, Payload]]:
        """Waits for a message of any rank."""
        return self._mailbox.recv_any(tag, expect, self._begin_wait(deadline_s), deadline_s)

    def quiet_s(self, rank: int) -> float:
        """Returns the seconds since bytes of a member have arrived; infinity if unknown."""
        del rank
        return math.inf

    def collective(self, name: str) -> AllReduce:
        return collective_named(name).run


class WallCommunicator(Group):
    """Communicator of one view; see :class:`farflung.types.Communicator`. It belongs to the view's thread.

    Args:
      view: View of its messages.
      native: Sums a tensor by the backend's collective; None if there is none.
    """

    lane: None = None

    def __init__(self, view: View, *, native: Callable[[Tensor], Pending[Tensor]] | None = None) -> None:
        super().__init__(view.mailbox, view.rank, view.size, view.sent)
        self.view = view
        """View of the members."""
        self.send, self.advance, self.reconnect = view.send, view.advance, view.reconnect
        self.relay, self.moved_nbytes = view.relay.serve, view.waits.moved_nbytes
        self._native = native

    @override
    def _begin_wait(self, deadline_s: float | None) -> float:
        del deadline_s
        return self.view.now()

    @override
    def quiet_s(self, rank: int) -> float:
        return self.view.transport.quiet_s(rank)

    def all_reduce(self, tensor: Tensor, tag: Tag) -> Pending[Tensor]:
        """Sums by the backend; calls match by their order, which must be equal on all ranks."""
        del tag
        if self._native is None:
            raise RuntimeError("native collectives were not asked for when the run began")
        return self._native(tensor)
