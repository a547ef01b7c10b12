"""View session of a real process: its members, messages, waits, and its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from torch import Tensor
from typing_extensions import override

from farflung.comm.channel import RELAYED_KIND, get_exchange_kind, is_control_plane
from farflung.comm.mailbox import MAX_UNRECEIVED_NBYTES, Mailbox, MailboxFull
from farflung.comm.members import PROCESS_ENDED, ViewMembers
from farflung.comm.records import CONTROL_VIEW
from farflung.comm.staging import Stage, is_on_host, stage_blocking
from farflung.comm.transport import Listener, Transport
from farflung.comm.waits import WaitMonitor
from farflung.comm.wire import (
    DIRECT_ROUTE,
    Head,
    Message,
    MessageKind,
    RelayRoute,
    Unauthorized,
    WireError,
    encode,
    parse_json,
)
from farflung.errors import DeadlinePassed, FarflungError, PeerFailed, PeerLost, ProtocolError
from farflung.tasks import Pending, create_failed
from farflung.types import Json, Payload, SentBytes, Tag

__all__ = ["ViewSession"]

LEAVE_WAIT_S = 1.0
"""Seconds for which a leaving rank waits for its peers to leave too."""
STUCK_S = 5.0
"""Seconds without any byte sent after which a leaving rank drops its unsent messages."""


class ViewSession(Listener):
    """Session of one rank in a membership view.

    It belongs to the thread that polls the transport; only the constructor and :meth:`ViewMembers.connect
    <farflung.comm.members.ViewMembers.connect>` may run before it.

    Args:
      transport: Transport of the view's messages.
      size: World size.
      read_clock: Clock, in seconds.
      number: Number of the view at first, see :meth:`advance_view`.
      needs_all_members: True if the loss of a member ends the view, as it must if exchanges need all ranks; otherwise
        only waits for that member fail.
      members: Initial members, including this rank; all ranks when not given. A view that does not need all
        members may admit more later.
      settings: Values that must be equal on all members, by name; compared at the start.
      max_nbytes: Largest payload accepted, in bytes.
      max_unreceived_nbytes: Most bytes of unreceived messages of each sender. When not given, there is no limit if
        the view needs all members, and :data:`farflung.comm.mailbox.MAX_UNRECEIVED_NBYTES` otherwise.
    """

    def __init__(
        self,
        transport: Transport,
        size: int,
        *,
        read_clock: Callable[[], float],
        number: int = 0,
        needs_all_members: bool = True,
        members: Iterable[int] | None = None,
        settings: Mapping[str, Json] | None = None,
        max_nbytes: int = 1 << 31,
        max_unreceived_nbytes: float | None = None,
    ) -> None:
        self.transport = transport
        transport.max_nbytes, transport.listener = max_nbytes, self
        self.mailbox = Mailbox(
            read_clock,
            max_unreceived_nbytes=max_unreceived_nbytes
            or (math.inf if needs_all_members else MAX_UNRECEIVED_NBYTES),
        )
        self.mailbox.view = number
        self.members = ViewMembers(
            transport, self.mailbox, size, needs_all=needs_all_members, members=members, settings=settings
        )
        self.rank, self.size = self.members.rank, size
        self.read_clock = read_clock
        """Clock, in seconds."""
        self.sent_bytes = SentBytes(size)
        """Payload bytes sent so far."""
        self.members.relay.on_relay = partial(self.sent_bytes.add, RELAYED_KIND)
        self.stage: Stage = stage_blocking
        """Copies a payload of another device to the host."""
        self.wait_monitor = WaitMonitor(self.members, read_clock)

    def advance_view(self, view: int) -> None:
        """Replaces the view by a newer one: ends the waits of the older view and withdraws its unsent messages.

        Raises:
          ValueError: the number is not higher.
        """
        older = self.mailbox.view
        self.mailbox.advance_view(view)
        self.transport.withdraw(older)
        self.members.relay.prune_greetings()

    # --- messages ---------------------------------------------------------------------------------------------------

    def send(
        self, payload: Payload, dst: int, tag: Tag, priority: int = 0, *, is_counted: bool = False
    ) -> Pending[None]:
        """Sends a message; done when it has left, see :meth:`farflung.comm.transport.Transport.send`.

        A payload of another device is counted (``is_counted``), then copied to the host first.
        """
        if not is_counted:
            self.sent_bytes.add(get_exchange_kind(tag.exchange), payload.nbytes, dst)
        if not is_on_host(payload):
            sent: Pending[None] = Pending()

            def send_staged(host: Pending[Payload]) -> None:
                if host.error is not None:
                    sent.set_exception(host.error)
                else:
                    sent.follow(self.send(host.result(), dst, tag, priority, is_counted=True))

            self.stage(payload).add_done_callback(send_staged)
            return sent
        member = self.members.by_rank.get(dst)
        if member is None or member.is_gone or not member.has_greeted:
            return create_failed(PeerLost(dst, "its connection is gone"))
        member.num_sent += 1
        hop = self.members.routes.next_hops[dst]
        route = DIRECT_ROUTE if hop == dst else RelayRoute(self.rank, dst, priority)
        frames = encode(MessageKind.DATA, self.mailbox.view, tag, payload, route=route)
        view = CONTROL_VIEW if is_control_plane(tag.exchange) else self.mailbox.view
        return self.transport.send(hop, frames, priority=priority, view=view)

    @override
    def handle_message(self, rank: int, message: Message) -> None:
        source, destination, _ = message.route
        sender = source if message.route != DIRECT_ROUTE and destination == self.rank else rank
        try:
            if message.route == DIRECT_ROUTE:
                self._process_message(rank, message)
            elif destination == self.rank:
                self._process_relayed(source, rank, message)
            elif rank in self.members.by_rank and self.members.by_rank[rank].has_greeted:
                self.members.relay.handle_message(rank, message)
            else:
                raise Unauthorized("a message before a greeting")
        except WireError as error:
            self.transport.refusals.count_message(error)
            if not isinstance(error, Unauthorized):
                self.handle_malformed(sender, message.payload.nbytes, str(error))

    @override
    def handle_malformed(self, rank: int, nbytes: int, reason: str) -> None:
        member = self.members.by_rank.get(rank)
        if member is None or member.is_gone:
            return
        error = PeerLost(rank, f"refused {nbytes:,} bytes from it: {reason}")
        if member.has_greeted:
            self.members.send_control(MessageKind.ABORT, rank, {"detail": str(error), "rank": rank})
        self.members.drop_member(rank, error)

    def _process_message(self, rank: int, message: Message) -> None:
        """Handles a message from ``rank`` that is addressed to this rank."""
        member = self.members.by_rank.get(rank)
        if message.kind is MessageKind.HELLO:
            self.members.handle_control(rank, message.kind, parse_json(message.payload))
            if member is not None and member.has_greeted:
                early_messages, member.early_messages = member.early_messages, []
                for early_message in early_messages:
                    self._process_message(rank, early_message)
        elif member is None or not member.has_greeted:
            raise Unauthorized("a message before a greeting")
        elif message.kind is MessageKind.DATA:
            member.num_received += 1
            try:
                self.mailbox.deliver(rank, message.tag, message.payload, message.view)
            except MailboxFull as error:
                raise WireError(str(error)) from None
            finally:
                if member.num_announced is not None and not member.is_gone:
                    self.members.complete_leave(rank)
        elif message.kind is MessageKind.WAITING:
            self.wait_monitor.handle_report(rank, parse_json(message.payload))
        else:
            self.members.handle_control(rank, message.kind, parse_json(message.payload))

    def _process_relayed(self, source: int, relay: int, message: Message) -> None:
        """Handles a relayed message; stores it if the relay delivers its sender's greeting later.

        Raises:
          Unauthorized: the relay or the sender is none, or more than ``max_nbytes`` of its messages are stored.
        """
        if self.members.routes.get_relay(source) != relay:
            raise Unauthorized("another rank's message, by a member that does not relay it")
        member = self.members.by_rank.get(source)
        if message.kind is MessageKind.HELLO or (member is not None and member.has_greeted):
            self.wait_monitor.record_message(source)
            self._process_message(source, message)
        elif member is None or member.is_gone:
            raise Unauthorized("a message of a rank that is no member")
        else:
            stored_nbytes = sum(stored.payload.nbytes for stored in member.early_messages)
            if stored_nbytes + message.payload.nbytes > self.transport.max_nbytes:
                raise Unauthorized("more before a greeting than any message has")
            member.early_messages.append(message)

    @override
    def get_recv_buffer(self, rank: int, head: Head, nbytes: int) -> Tensor | None:
        if head.kind is not MessageKind.DATA or head.route != DIRECT_ROUTE or not head.has_large_first_part:
            return None
        return self.mailbox.find_recv_buffer(rank, head.tag, head.view, nbytes)

    # --- connections ------------------------------------------------------------------------------------------------

    @override
    def handle_close(self, rank: int) -> None:
        self.members.handle_close(rank)

    @override
    def handle_process_end(self, rank: int) -> None:
        self.members.revoke_admission(rank, PeerLost(rank, PROCESS_ENDED))

    @override
    def handle_denial(self, rank: int) -> None:
        member = self.members.by_rank.get(rank)
        if member is None or not member.has_greeted:
            self.mailbox.end(
                ProtocolError(f"rank {rank} does not accept this replica's key: it was given another list")
            )

    # --- the end ----------------------------------------------------------------------------------------------------

    def leave(self, error: BaseException | None, *, relay_idle_s: float = LEAVE_WAIT_S) -> None:
        """Announces to all peers that this rank leaves, or the error on which it ends.

        Unsent messages are sent first, or withdrawn if there is an error.

        Args:
          error: Error on which the rank ends; None if it leaves normally.
          relay_idle_s: After a normal leave, seconds without a relayed message after which relaying ends.
        """
        remaining_ranks = self.members.remaining_ranks
        if error is None and self.mailbox.ended.error is None:
            self._send_all()
        else:
            self.transport.withdraw(self.mailbox.view)
        body: dict[str, Json]
        if error is None:
            kind, body = MessageKind.LEAVE, {}
        elif isinstance(error, (PeerLost, PeerFailed, DeadlinePassed)):
            kind, body = MessageKind.ABORT, {"detail": str(error), "rank": error.rank}
        else:
            detail = str(error) if isinstance(error, FarflungError) else f"{type(error).__name__}: {error}"
            kind, body = MessageKind.ABORT, {"detail": detail, "rank": self.rank}
        self.members.announce_end(kind, body, remaining_ranks)
        # Wait for the peers to leave before closing: a message to a peer that closes at the same moment would wait for
        # a reconnection, and a peer that has not greeted yet would never learn the error.
        end_s = self.read_clock() + LEAVE_WAIT_S
        while (remaining_s := end_s - self.read_clock()) > 0:
            if not self.members.remaining_ranks and not self.transport.queued_nbytes:
                break
            self.transport.poll(remaining_s)
        if error is None:
            self._continue_relaying(relay_idle_s)

    def _continue_relaying(self, patience_s: float) -> None:
        """Relays until no pair needs it, or no message has been relayed for ``patience_s`` seconds."""
        relay = self.members.relay
        end_s, num_relayed = self.read_clock() + patience_s, relay.num_relayed
        while relay.is_needed(self.members.present_ranks) and (remaining_s := end_s - self.read_clock()) > 0:
            self.transport.poll(remaining_s)
            if relay.num_relayed != num_relayed:
                end_s, num_relayed = self.read_clock() + patience_s, relay.num_relayed

    def _send_all(self) -> None:
        """Sends all queued messages; gives up if no byte leaves for :data:`STUCK_S` seconds."""
        end_s, queued_nbytes = self.read_clock() + STUCK_S, self.transport.queued_nbytes
        while (
            queued_nbytes
            and self.mailbox.ended.error is None
            and (remaining_s := end_s - self.read_clock()) > 0
        ):
            self.transport.poll(remaining_s)
            if self.transport.queued_nbytes != queued_nbytes:
                end_s, queued_nbytes = self.read_clock() + STUCK_S, self.transport.queued_nbytes

    def close(self) -> None:
        """Closes the transport."""
        self.transport.close()
