"""Communicators of one member: the half that both worlds share, and that of real processes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor
from typing_extensions import override

from farflung.comm.collectives import AUTO, auto, find_collective
from farflung.comm.mailbox import Mailbox
from farflung.comm.view import ViewSession
from farflung.tasks import Pending
from farflung.types import AllReduce, Payload, SentBytes, Tag

__all__ = ["BaseCommunicator", "WallCommunicator"]


class BaseCommunicator:
    """Half of a :class:`farflung.types.Communicator` that receives messages and counts sent bytes.

    Args:
      mailbox: Mailbox of the member.
      rank: Rank of the member.
      size: Number of ranks.
      sent_bytes: Bytes sent so far.
    """

    def __init__(self, mailbox: Mailbox, rank: int, size: int, sent_bytes: SentBytes) -> None:
        self.rank, self.size, self.sent_bytes = rank, size, sent_bytes
        self.auto_collectives: Mapping[int, str] = {}
        self.recv: Callable[..., Pending[Payload]] = mailbox.recv
        self.recv_any: Callable[..., Pending[tuple[int, Payload]]] = partial(mailbox.recv, None)
        self.post_recv_buffer = mailbox.post_recv_buffer
        self.cancel_exchange = mailbox.cancel_exchange
        self.advance_view = mailbox.advance_view
        self.wait_for_join, self.wait_for_leave = mailbox.arrivals.get, mailbox.departures.get

    def get_idle_s(self, rank: int) -> float:
        """Returns the seconds since bytes of a member have arrived; infinity if unknown."""
        del rank
        return math.inf

    def get_collective(self, name: str) -> AllReduce:
        return partial(auto, self.auto_collectives) if name == AUTO else find_collective(name).run


class WallCommunicator(BaseCommunicator):
    """Communicator of one view; see :class:`farflung.types.Communicator`. It belongs to the view's thread.

    Args:
      session: View of its messages.
      native: Sums a tensor by the backend's collective; None if there is none.
    """

    coding_processor: None = None

    def __init__(
        self, session: ViewSession, *, native: Callable[[Tensor], Pending[Tensor]] | None = None
    ) -> None:
        super().__init__(session.mailbox, session.rank, session.size, session.sent_bytes)
        self.session = session
        """View of the members."""
        self.send, self.advance_view = session.send, session.advance_view
        self.reconnect, self.relay = session.members.reconnect, session.members.relay.serve_pair
        self.get_traffic_nbytes = session.wait_monitor.get_traffic_nbytes
        self._native = native

    @override
    def get_idle_s(self, rank: int) -> float:
        return self.session.transport.get_traffic(rank).idle_s

    def all_reduce(self, tensor: Tensor, tag: Tag) -> Pending[Tensor]:
        """Sums by the backend; calls match by their order, which must be equal on all ranks."""
        del tag
        if self._native is None:
            raise RuntimeError("native collectives were not asked for when the run began")
        return self._native(tensor)
