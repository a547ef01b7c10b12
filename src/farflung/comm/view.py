"""View session of a real process: admission, messages, the failure detector, and how members leave."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from farflung.comm.channel import RELAYED_KIND, get_exchange_kind, is_control_plane
from farflung.comm.mailbox import MAX_UNRECEIVED_NBYTES, Mailbox, MailboxFull
from farflung.comm.members import ViewMembers
from farflung.comm.records import CONTROL_VIEW
from farflung.comm.relay import Relay
from farflung.comm.staging import Stage, is_on_host, stage_blocking
from farflung.comm.transport import FIRST_PRIORITY, LAST_PRIORITY, Transport
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
CONNECTION_CLOSED = "its connection was closed from its end"
_CONTROL = Tag(0)


class ViewSession(ViewMembers):
    """Session of one rank in a membership view.

    It belongs to the thread that polls the transport; only the constructor and :meth:`connect` may run before it.

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
        super().__init__(
            transport, size, needs_all_members=needs_all_members, members=members, settings=settings
        )
        self.mailbox = Mailbox(
            max_unreceived_nbytes or (math.inf if needs_all_members else MAX_UNRECEIVED_NBYTES)
        )
        self.mailbox.view = number
        self.end_error: BaseException | None = None
        """Error that has ended the view."""
        self.leave_detail = "it had left the run"
        """Error detail of waits for a sender that has left."""
        transport.max_nbytes = max_nbytes
        self.read_clock = read_clock
        """Clock, in seconds."""
        self.sent_bytes = SentBytes(size)
        """Payload bytes sent so far."""
        self.stage: Stage = stage_blocking
        """Copies a payload of another device to the host."""
        self.wait_monitor = WaitMonitor(self)
        self.relay = Relay(transport, self.routes, size, allow_detours=not needs_all_members)
        self.relay.on_relay = partial(self.sent_bytes.add, RELAYED_KIND)
        self._early_messages: dict[int, list[Message]] = {}
        """Relayed messages that arrived before their sender's greeting, by sender."""
        self.num_sent: Counter[int] = Counter()
        """Number of messages that this rank has sent to each peer."""
        self.num_received: Counter[int] = Counter()
        """Number of messages received from each peer."""
        self._leave_counts: dict[int, int] = {}
        """Peers that have announced their leave, with the number of messages each had sent, until all have arrived."""
        self._end_message: tuple[MessageKind, dict[str, Json]] | None = None
        """Kind and body of the message that announces this rank's own end."""

    @property
    def refusals(self) -> dict[str, Json]:
        """Number of refused messages and connections so far; empty if there are none."""
        counts = {"messages": self.transport.num_refused, "connections": self.transport.num_rejected}
        return dict(counts) if any(counts.values()) else {}

    def advance_view(self, view: int) -> None:
        """Replaces the view by a newer one: ends the waits of the older view and withdraws its unsent messages.

        Raises:
          ValueError: the number is not higher.
        """
        older = self.mailbox.view
        self.mailbox.advance_view(view)
        self.transport.withdraw(older)
        self.relay.prune_greetings()

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
        if dst in self._left_ranks or dst not in self._greeted:
            return create_failed(PeerLost(dst, "its connection is gone"))
        self.num_sent[dst] += 1
        hop = self.routes.get_next_hop(dst)
        route = DIRECT_ROUTE if hop == dst else RelayRoute(self.rank, dst, priority)
        frames = encode(MessageKind.DATA, self.mailbox.view, tag, payload, route=route)
        view = CONTROL_VIEW if is_control_plane(tag.exchange) else self.mailbox.view
        return self.transport.send(hop, frames, priority=priority, view=view)

    @override
    def handle_message(self, rank: int, message: Message) -> None:
        source, destination, _ = message.route
        is_relayed = message.route != DIRECT_ROUTE and destination == self.rank
        try:
            self._route(rank, message)
        except Unauthorized:
            raise
        except WireError as error:
            self.handle_malformed(source if is_relayed else rank, message.payload.nbytes, str(error))
            raise

    @override
    def handle_malformed(self, rank: int, nbytes: int, reason: str) -> None:
        if rank in self._left_ranks:
            return
        error = PeerLost(rank, f"refused {nbytes:,} bytes from it: {reason}")
        if rank in self._greeted:
            self.send_control(MessageKind.ABORT, rank, {"detail": str(error), "rank": rank})
        self._mark_lost(rank, error)
        self._report_gone(rank, error.detail)
        self.transport.remove_peer(rank)

    def _route(self, rank: int, message: Message) -> None:
        """Handles, stores or relays a message."""
        source, destination, _ = message.route
        if message.route == DIRECT_ROUTE:
            self._process_message(rank, message)
        elif destination != self.rank:
            self._check_greeted(rank)
            self.relay.handle_message(rank, message)
        elif self.routes.get_relay(source) != rank:
            raise Unauthorized("another rank's message, by a member that does not relay it")
        elif source in self._greeted or message.kind is MessageKind.HELLO:
            self.wait_monitor.record_message(source)
            self._process_message(source, message)
        else:
            self._store_early(source, message)

    def _store_early(self, rank: int, message: Message) -> None:
        """Stores a message until its sender's greeting, which a relay may deliver later.

        Raises:
          Unauthorized: the sender is not a member, or more than ``max_nbytes`` of its messages are stored.
        """
        if rank not in self._members - self._left_ranks:
            raise Unauthorized("a message of a rank that is no member")
        messages = self._early_messages.setdefault(rank, [])
        if sum(stored.payload.nbytes for stored in (*messages, message)) > self.transport.max_nbytes:
            raise Unauthorized("more before a greeting than any message has")
        messages.append(message)

    def _process_message(self, rank: int, message: Message) -> None:
        """Handles a message from ``rank`` that is addressed to this rank."""
        if message.kind is MessageKind.HELLO:
            self._handle_hello(rank, parse_json(message.payload))
            return
        self._check_greeted(rank)
        if message.kind is MessageKind.DATA:
            self.num_received[rank] += 1
            try:
                self.mailbox.deliver(rank, message.tag, message.payload, message.view)
            except MailboxFull as error:
                raise WireError(str(error)) from None
            finally:
                self._complete_leave(rank)
        else:
            self._handle_control(rank, message)

    @override
    def get_recv_buffer(self, rank: int, head: Head, nbytes: int) -> Tensor | None:
        if head.kind is not MessageKind.DATA or head.route != DIRECT_ROUTE or not head.has_large_first_part:
            return None
        return self.mailbox.find_recv_buffer(rank, head.tag, head.view, nbytes)

    @override
    def handle_close(self, rank: int) -> None:
        self._handle_gone(rank, CONNECTION_CLOSED)
        self._report_gone(rank, CONNECTION_CLOSED)

    def _report_gone(self, rank: int, reason: str) -> None:
        """Reports the loss of a peer to the ranks that reach it through this one; marks the ranks behind it as lost."""
        self._report_lost(rank, reason)
        for relayed_rank in self.routes.list_ranks_behind(rank):
            self._handle_gone(relayed_rank, f"rank {rank} is gone, which relayed its messages")

    def _report_lost(self, rank: int, reason: str) -> None:
        """Reports the loss of a peer to the ranks that reach it through this one, behind all its relayed messages."""
        self.relay.handle_lost(rank)
        for receiver in self.routes.list_ranks_served(rank):
            if receiver in self.get_present_ranks():
                body: dict[str, Json] = {"rank": rank, "token": self.routes.get_token(rank), "detail": reason}
                self.send_control(MessageKind.LOST, receiver, body, last=True)

    @override
    def handle_denial(self, rank: int) -> None:
        if rank not in self._greeted:
            self.end(
                ProtocolError(f"rank {rank} does not accept this replica's key: it was given another list")
            )

    def _handle_hello(self, rank: int, body: dict[str, Any]) -> None:
        """Answers a greeting, compares the settings, and completes or refuses the admission."""
        if body.get("rank") != rank:
            raise Unauthorized("a greeting with another rank as its source")
        if self.routes.should_accept(rank) and self.routes.get_relay(rank) is None:
            self._greet(rank)
        if self._end_message is not None:
            kind, parting = self._end_message
            self.send_control(kind, rank, {**parting, "behind": self.num_sent[rank]}, last=True)
        error = self._compare_settings(rank, body.get("settings"))
        if error is not None and rank in self._admissions:
            self.send_control(MessageKind.ABORT, rank, {"detail": str(error), "rank": rank})
            self._report_lost(rank, str(error))
            self.revoke_admission(rank, error)
            return
        self._greeted.add(rank)
        for relayed_rank in self.routes.list_ranks_behind(rank):
            self._greet(relayed_rank)
        if error is not None:
            self.end(error)
        self._update_expected()
        if not self.list_missing():
            self.ready.set_result(None)
        if rank in self._admissions:
            self.mailbox.admit_sender(rank)
            self._admissions[rank].set_result(None)
        for message in self._early_messages.pop(rank, ()):
            self._process_message(rank, message)

    def _handle_control(self, rank: int, message: Message) -> None:
        body = parse_json(message.payload)
        if message.kind is MessageKind.LEAVE:
            num_sent = body.get("behind")
            if not isinstance(num_sent, int):
                raise WireError("a leave without the number of messages sent before it")
            self._leave_counts[rank] = num_sent
            self._complete_leave(rank)
        elif message.kind is MessageKind.LOST:
            self._handle_lost_report(rank, body)
        elif message.kind is MessageKind.WAITING:
            self.wait_monitor.handle_report(rank, body)
        elif message.kind is MessageKind.ABORT:
            failed_rank, detail = body.get("rank"), str(body.get("detail"))
            if failed_rank == rank:
                self._mark_lost(rank, PeerFailed(rank, detail))
            elif self.needs_all_members and isinstance(failed_rank, int) and failed_rank != self.rank:
                self._mark_lost(rank, PeerLost(failed_rank, f"rank {rank} says: {detail}"))
            else:
                self._mark_lost(rank, PeerLost(rank, f"it left, saying: {detail}"))

    def _complete_leave(self, rank: int) -> None:
        """Ends a peer's membership once it has announced its leave and every message that it sent has arrived."""
        if rank in self._leave_counts and self.num_received[rank] >= self._leave_counts[rank]:
            self._mark_left(rank)

    def _mark_left(self, rank: int) -> None:
        del self._leave_counts[rank]
        self._left_ranks.add(rank)
        self.mailbox.fail_from(rank, PeerLost(rank, self.leave_detail))

    def _handle_gone(self, rank: int, reason: str) -> None:
        """Ends the membership of an unreachable peer: it has left if it announced its leave, and is lost otherwise."""
        if rank in self._leave_counts:
            self._mark_left(rank)
        elif rank not in self._left_ranks:
            self._mark_lost(rank, PeerLost(rank, reason))

    def _handle_lost_report(self, relay: int, body: Mapping[str, Any]) -> None:
        """Handles a relay's report that a rank behind it is lost."""
        rank = body.get("rank")
        if not self.needs_all_members and isinstance(rank, int) and self.routes.get_relay(rank) != relay:
            return  # it has another route since
        if not isinstance(rank, int) or self.routes.get_relay(rank) != relay:
            raise Unauthorized("a loss told by a member that does not relay")
        if body.get("token") == self.routes.get_token(rank):
            self._handle_gone(rank, f"rank {relay}, which relays its messages, says: {body.get('detail')}")

    @override
    def _drop_connection(self, rank: int) -> None:
        self._mark_lost(rank, PeerLost(rank, "its connection was given up"))
        self._report_gone(rank, "its connection was given up")
        self.transport.remove_peer(rank)

    @override
    def _reset(self, rank: int) -> None:
        self.relay.handle_lost(rank)
        self._early_messages.pop(rank, None)
        self._leave_counts.pop(rank, None)
        self.wait_monitor.forget(rank)
        self.num_received[rank] = self.num_sent[rank] = 0

    @override
    def _greet(self, rank: int) -> None:
        """Sends the greeting: rank, settings, and through a relay the receiver's token."""
        body: dict[str, Json] = {"rank": self.rank, "settings": self._settings}
        if self.routes.get_relay(rank) is not None:
            body["to"] = self.routes.get_token(rank)
        self.send_control(MessageKind.HELLO, rank, body, last=True)

    def send_control(
        self, kind: MessageKind, rank: int, body: Mapping[str, Json], *, last: bool = False
    ) -> None:
        """Sends a control message to a member, ahead of all queued messages, or with ``last`` behind them."""
        text = torch.frombuffer(bytearray(json.dumps(body).encode()), dtype=torch.uint8)
        hop = self.routes.get_next_hop(rank)
        route = (
            DIRECT_ROUTE
            if hop == rank
            else RelayRoute(self.rank, rank, LAST_PRIORITY if last else FIRST_PRIORITY)
        )
        frames = encode(kind, self.mailbox.view, _CONTROL, Payload((text,)), route=route)
        try:
            self.transport.send_control(hop, frames, last=last)
        except PeerLost as error:
            self._mark_lost(hop, error)

    # --- the end ----------------------------------------------------------------------------------------------------

    def end(self, error: BaseException) -> None:
        """Ends the view: fails all waits, pending and later, with the first error."""
        if self.end_error is None:
            self.end_error = error
        self.mailbox.end(self.end_error)
        self.ready.set_exception(self.end_error)
        self.wait_monitor.end(self.end_error)

    def _mark_lost(self, rank: int, error: BaseException) -> None:
        """Marks a member as lost: ends the view if it needs all members, or else the waits for that member."""
        self.revoke_admission(rank, error)
        self._left_ranks.add(rank)
        if self.needs_all_members:
            self.end(error)
        else:
            self.mailbox.fail_from(rank, error)

    def leave(self, error: BaseException | None, *, relay_idle_s: float = LEAVE_WAIT_S) -> None:
        """Announces to all peers that this rank leaves, or the error on which it ends.

        Unsent messages are sent first, or withdrawn if there is an error.

        Args:
          error: Error on which the rank ends; None if it leaves normally.
          relay_idle_s: After a normal leave, seconds without a relayed message after which relaying ends.
        """
        remaining_ranks = self._addresses.keys() - self._left_ranks
        if error is None and self.end_error is None:
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
        self._end_message = (kind, body)
        for rank in remaining_ranks:
            if rank in self._greeted or self.routes.should_connect_to(rank):
                self.send_control(kind, rank, {**body, "behind": self.num_sent[rank]}, last=True)
        # Wait for the peers to leave before closing: a message to a peer that closes at the same moment would wait for
        # a reconnection, and a peer that has not greeted yet would never learn the error.
        end_s = self.read_clock() + LEAVE_WAIT_S
        while (remaining_s := end_s - self.read_clock()) > 0:
            if not self._addresses.keys() - self._left_ranks and not self.transport.queued_nbytes:
                break
            self.transport.poll(remaining_s)
        if error is None:
            self._continue_relaying(relay_idle_s)

    def _continue_relaying(self, patience_s: float) -> None:
        """Relays until no pair needs it, or no message has been relayed for ``patience_s`` seconds."""
        end_s, num_relayed = self.read_clock() + patience_s, self.relay.num_relayed
        while self.relay.is_needed(self._left_ranks) and (remaining_s := end_s - self.read_clock()) > 0:
            self.transport.poll(remaining_s)
            if self.relay.num_relayed != num_relayed:
                end_s, num_relayed = self.read_clock() + patience_s, self.relay.num_relayed

    def _send_all(self) -> None:
        """Sends all queued messages; gives up if no byte leaves for :data:`STUCK_S` seconds."""
        end_s, queued_nbytes = self.read_clock() + STUCK_S, self.transport.queued_nbytes
        while queued_nbytes and self.end_error is None and (remaining_s := end_s - self.read_clock()) > 0:
            self.transport.poll(remaining_s)
            if self.transport.queued_nbytes != queued_nbytes:
                end_s, queued_nbytes = self.read_clock() + STUCK_S, self.transport.queued_nbytes

    def close(self) -> None:
        """Closes the transport; while members are present, sends queued messages first, for a few seconds at most."""
        self.transport.close(linger=bool(self.get_present_ranks()))
