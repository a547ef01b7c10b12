"""What one member of a view of real processes sends and receives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from torch import Tensor
from typing_extensions import override

from farflung.comm.channel import RELAYED, kind_of
from farflung.comm.collectives import collective_named
from farflung.comm.receiving import Receiving
from farflung.comm.staging import Stage, at_once, on_host
from farflung.comm.view import View
from farflung.tasks import Pending
from farflung.types import AllReduce, Payload, Sent, Tag

__all__ = ["WallCommunicator"]


class WallCommunicator(Receiving):
    """The communicator of one view; see :class:`farflung.types.Communicator`. It belongs to the view's thread.

    Args:
      view: whose messages.
      native: sums a tensor by the backend's collective, or ``None`` where there is none.
      stage: how a payload of another device comes to the host.
    """

    lane: None = None

    def __init__(
        self,
        view: View,
        *,
        native: Callable[[Tensor], Pending[Tensor]] | None = None,
        stage: Stage = at_once,
    ) -> None:
        super().__init__(view.mailbox)
        self.rank, self.size = view.rank, view.size
        self.auto: Mapping[int, str] = {}
        self.sent = Sent(view.size)
        self.view = view
        """The members."""
        view.relay.passed = partial(self.sent.add, RELAYED)
        self._native, self._stage = native, stage

    def send(self, payload: Payload, dst: int, tag: Tag, priority: int = 0) -> Pending[None]:
        """Hands the message to the transport; a payload of another device is brought to the host first."""
        self.sent.add(kind_of(tag.exchange), payload.nbytes, dst)
        if on_host(payload):
            return self.view.send(payload, dst, tag, priority)
        left: Pending[None] = Pending()

        def staged(host: Pending[Payload]) -> None:
            if host.error is not None:
                left.fail(host.error)
            else:
                left.follow(self.view.send(host.result(), dst, tag, priority))

        self._stage(payload).on_done(staged)
        return left

    @override
    def _wait_begins(self, deadline_s: float | None) -> float:
        del deadline_s
        return self.view.now()

    def advance(self, view: int) -> None:
        """Goes on as a newer view."""
        self.view.advance(view)

    def reconnect(self, rank: int, relay: int | None = None) -> Pending[None]:
        return self.view.reconnect(rank, relay)

    @override
    def quiet_s(self, rank: int) -> float:
        return self.view.transport.quiet_s(rank)

    def moved_nbytes(self, rank: int | None = None) -> int:
        return self.view.moved_nbytes(rank)

    def relay(self, one: int, other: int) -> None:
        self.view.relay.serve(one, other)

    def collective(self, name: str) -> AllReduce:
        return collective_named(name).run

    def all_reduce(self, tensor: Tensor, tag: Tag) -> Pending[Tensor]:
        """The backend's sum; calls match by their order, so all ranks make them in the same one."""
        del tag
        if self._native is None:
            raise RuntimeError("native collectives were not asked for when the run began")
        return self._native(tensor)
