"""Members of a view: admission, greetings, losses and leaves."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from farflung.comm.interface import explain_reachability
from farflung.comm.mailbox import Mailbox
from farflung.comm.peer import Peer, check_peers
from farflung.comm.records import CONTROL_VIEW
from farflung.comm.relay import Relay
from farflung.comm.routes import RoutingTable
from farflung.comm.transport import FIRST_PRIORITY, LAST_PRIORITY, Transport
from farflung.comm.wire import (
    DIRECT_ROUTE,
    Message,
    MessageKind,
    RelayRoute,
    Unauthorized,
    WireError,
    encode,
)
from farflung.errors import DeadlinePassed, PeerFailed, PeerLost, ProtocolError
from farflung.tasks import Pending, create_failed
from farflung.types import Json, Payload, Tag

__all__ = ["PROCESS_ENDED", "ViewMember", "ViewMembers"]

PROCESS_ENDED = "no process listens at its address any more"
"""Error detail for a member whose process has ended."""
CONNECTION_CLOSED = "its connection was closed from its end"
_CONTROL = Tag(0)


@dataclass(eq=False, slots=True)
class ViewMember:
    """Another member of a view, from its admission until its rank is admitted again.

    Args:
      admitted: Done once it has greeted; None for a member from the start.
    """

    admitted: Pending[None] | None = None
    has_greeted: bool = False
    is_gone: bool = False
    """True once it has left or was lost."""
    num_sent: int = 0
    """Number of messages that this rank has sent to it."""
    num_received: int = 0
    """Number of messages received from it."""
    num_announced: int | None = None
    """Number of messages that it had sent when it announced its leave; None before."""
    early_messages: list[Message] = field(default_factory=list)
    """Relayed messages that arrived before its greeting."""

    @property
    def is_present(self) -> bool:
        """True if it has greeted and is neither lost nor has left."""
        return self.has_greeted and not self.is_gone


class ViewMembers:
    """Other members of a view, and the control messages between them.

    Args:
      transport: Transport of the view's messages.
      mailbox: Mailbox of this rank, whose waits fail if members are lost.
      size: World size.
      needs_all: True if the loss of a member ends the view; otherwise only waits for that member fail.
      members: Initial members, including this rank; all ranks when not given.
      settings: Values that must be equal on all members, by name.
    """

    def __init__(
        self,
        transport: Transport,
        mailbox: Mailbox,
        size: int,
        *,
        needs_all: bool,
        members: Iterable[int] | None,
        settings: Mapping[str, Json] | None,
    ) -> None:
        self.transport, self.mailbox = transport, mailbox
        self.rank, self.size = transport.local_peer.rank, size
        self.needs_all = needs_all
        self.routes = RoutingTable(transport.local_peer)
        self.relay = Relay(transport, self.routes, size, allow_detours=not needs_all)
        self.by_rank = {
            rank: ViewMember() for rank in (range(size) if members is None else members) if rank != self.rank
        }
        """Members but for this one, by rank; those that have left or were lost stay."""
        self.ready: Pending[None] = Pending()
        """Done once every initial member has greeted."""
        self.leave_detail = "it had left the run"
        """Error detail of waits for a sender that has left."""
        self._settings = {"number of replicas": size, **(settings or {})}
        self._end_message: tuple[MessageKind, dict[str, Json]] | None = None
        """Kind and body of the message that announces this rank's own end."""
        self.ready.follow(mailbox.ended)
        if not self.by_rank:
            self.ready.set_result(None)
            transport.set_expected(0)

    @property
    def present_ranks(self) -> set[int]:
        """Ranks of the members that are present."""
        return {rank for rank, member in self.by_rank.items() if member.is_present}

    @property
    def remaining_ranks(self) -> set[int]:
        """Ranks of the members, with or without a greeting, that are neither lost nor have left."""
        return {rank for rank, member in self.by_rank.items() if rank in self.routes and not member.is_gone}

    @property
    def missing_ranks(self) -> list[int]:
        """Ranks of the members that have not greeted yet, those reached through a relay last."""
        missing = [rank for rank, member in self.by_rank.items() if not member.has_greeted]
        return sorted(missing, key=lambda rank: (self.routes.get_relay(rank) is not None, rank))

    # --- admission --------------------------------------------------------------------------------------------------

    def connect(self, peers: Iterable[Peer]) -> None:
        """Registers the peers' addresses and keys, connects to those that this rank has to connect to, and greets them.

        Raises:
          ConfigError: a key is not on this rank's list; some ranks encrypt and others do not; or two ranks cannot
            connect and no rank can relay between them.
          ProtocolError: the peers do not make up a run.
        """
        remote_peers = [peer for peer in peers if peer.rank != self.rank]
        check_peers(self.transport.local_peer, remote_peers, self.transport.keys)
        self.routes.add_peers(remote_peers)
        self.transport.connect_peers(
            [peer for peer in remote_peers if self.routes.get_relay(peer.rank) is None]
        )
        self._update_expected()
        for peer in remote_peers:
            if self.routes.should_connect_to(peer.rank):
                self._greet(peer.rank)

    def admit(self, peer: Peer) -> Pending[None]:
        """Admits a member after :meth:`connect`: accepts its connection, or connects to it.

        A rank that has left or was lost may be admitted again.

        Returns:
          Done once the peer has greeted, as :meth:`farflung.types.Communicator.wait_for_join` reports too.
          Fails with :class:`ProtocolError` if its settings differ, which is sent to it; with :class:`PeerLost`
          if it is lost or its admission is revoked before its greeting, see :meth:`revoke_admission`.

        Raises:
          ConfigError: its key is not on this rank's list; only one of the two encrypts; or no rank can relay
            between it and another.
          ProtocolError: the view needs all members; the rank is present already, or does not belong to the run.
        """
        if self.needs_all:
            raise ProtocolError(
                f"rank {peer.rank} cannot join later: every exchange of this run needs all replicas"
            )
        if peer.rank == self.rank or peer.rank in self.present_ranks or peer.rank >= self.size:
            raise ProtocolError(
                f"rank {peer.rank} of {self.size} is present already, or not a rank of this run"
            )
        check_peers(self.transport.local_peer, [peer], self.transport.keys)
        lost_ranks = {*range(self.size)} - {self.rank, peer.rank, *self.remaining_ranks}
        self.routes.add_peers([peer], lost_ranks)
        return self._admit_peer(peer)

    def reconnect(self, rank: int, relay: int | None = None) -> Pending[None]:
        """Reconnects to a member whose connection is broken; both ends have to call it.

        Args:
          rank: Rank of the member.
          relay: Rank of a member that both can reach, which calls :meth:`farflung.comm.relay.Relay.serve_pair`;
            None keeps the route.

        Returns:
          Done once it has greeted again; fails with :class:`PeerLost` if its process has ended or its address
          is unknown.
        """
        if rank not in self.routes:
            return create_failed(PeerLost(rank, "its address is not known"))
        if rank in self.present_ranks:
            self.drop_member(rank, PeerLost(rank, "its connection was given up"))
        self.routes.set_detour(self.rank, rank, relay)
        return self._admit_peer(self.routes.get_peer(rank), is_reconnect=True)

    def _admit_peer(self, peer: Peer, *, is_reconnect: bool = False) -> Pending[None]:
        self.relay.handle_lost(peer.rank)
        admitted = Pending[None]()
        self.by_rank[peer.rank] = ViewMember(admitted)
        relay = self.routes.get_relay(peer.rank)
        if relay is None:
            self.transport.connect_peers([peer], is_reconnect=is_reconnect)
        else:
            self.transport.remove_peer(peer.rank)
        self._update_expected()
        if self.routes.should_connect_to(peer.rank) or relay in self.present_ranks:
            self._greet(peer.rank)
        return admitted

    def revoke_admission(self, rank: int, error: BaseException) -> None:
        """Revokes the admission of a member that has not greeted yet; its wait fails with ``error``."""
        member = self.by_rank.get(rank)
        if member is None or member.admitted is None or member.has_greeted:
            return
        del self.by_rank[rank]
        self.transport.remove_peer(rank)
        self._update_expected()
        member.admitted.set_exception(error)

    def build_timeout(self, time_s: float) -> DeadlinePassed | None:
        """Builds the error of an initial member that has not greeted for ``time_s`` seconds; None if all have."""
        missing = self.missing_ranks
        if self.ready.is_done or not missing:
            return None
        rank = missing[0]
        peer, host = self.routes.get_peer(rank), self.transport.local_peer.machine
        if peer.machine is not None and host is not None and peer.machine != host:
            detail = (
                f": {peer.address} is reached only from {peer.machine}, and this is {host}: "
                f"{explain_reachability()}"
            )
        elif self.transport.has_failed_auth(rank):
            detail = f": {peer.address} was reached, but did not prove to be that rank"
        elif (relay := self.routes.describe_relay(rank)) or peer.address is None:
            detail = relay
        else:
            detail = f": is it running, and can {peer.address} be reached from here?"
        return DeadlinePassed(rank, f"its greeting{detail}", time_s)

    def _update_expected(self) -> None:
        self.transport.set_expected(sum(map(self.routes.should_accept, self.missing_ranks)))

    # --- control messages -------------------------------------------------------------------------------------------

    def send_control(
        self, kind: MessageKind, rank: int, body: Mapping[str, Json], *, last: bool = False
    ) -> None:
        """Sends a control message to a member, ahead of all queued messages, or with ``last`` behind them."""
        text = torch.frombuffer(bytearray(json.dumps(body).encode()), dtype=torch.uint8)
        priority = LAST_PRIORITY if last else FIRST_PRIORITY
        hop = self.routes.next_hops[rank]
        route = DIRECT_ROUTE if hop == rank else RelayRoute(self.rank, rank, priority)
        frames = encode(kind, self.mailbox.view, _CONTROL, Payload((text,)), route=route)
        # If the connection is gone, that has been reported.
        self.transport.send(hop, frames, priority=priority, view=CONTROL_VIEW)

    def _greet(self, rank: int) -> None:
        """Sends the greeting: rank, settings, and through a relay the receiver's token."""
        body: dict[str, Json] = {"rank": self.rank, "settings": self._settings}
        if self.routes.get_relay(rank) is not None:
            body["to"] = self.routes.get_token(rank)
        self.send_control(MessageKind.HELLO, rank, body, last=True)

    def announce_end(self, kind: MessageKind, body: dict[str, Json], ranks: Collection[int]) -> None:
        """Announces to some members, and to those that greet later, that this rank leaves or has failed."""
        self._end_message = (kind, body)
        for rank in ranks:
            member = self.by_rank.get(rank)
            if member is not None and (member.has_greeted or self.routes.should_connect_to(rank)):
                self._send_end(rank, member.num_sent)

    def _send_end(self, rank: int, num_sent: int) -> None:
        if self._end_message is not None:
            kind, body = self._end_message
            self.send_control(kind, rank, {**body, "behind": num_sent}, last=True)

    def handle_control(self, rank: int, kind: MessageKind, body: Mapping[str, Any]) -> None:
        """Handles a greeting, a leave, a failure, or a relay's report of a loss.

        Raises:
          WireError: the message is malformed, or not one that ``rank`` may send.
        """
        if kind is MessageKind.HELLO:
            self._handle_hello(rank, body)
        elif kind is MessageKind.LEAVE:
            num_sent = body.get("behind")
            if not isinstance(num_sent, int):
                raise WireError("a leave without the number of messages sent before it")
            self.by_rank[rank].num_announced = num_sent
            self.complete_leave(rank)
        elif kind is MessageKind.LOST:
            self._handle_lost_report(rank, body)
        elif kind is MessageKind.ABORT:
            failed_rank, detail = body.get("rank"), str(body.get("detail"))
            if failed_rank == rank:
                self._mark_lost(rank, PeerFailed(rank, detail))
            elif self.needs_all and isinstance(failed_rank, int) and failed_rank != self.rank:
                self._mark_lost(rank, PeerLost(failed_rank, f"rank {rank} says: {detail}"))
            else:
                self._mark_lost(rank, PeerLost(rank, f"it left, saying: {detail}"))

    def _handle_hello(self, rank: int, body: Mapping[str, Any]) -> None:
        """Answers a greeting, compares the settings, and completes or refuses the admission."""
        member = self.by_rank.get(rank)
        if member is None or body.get("rank") != rank:
            raise Unauthorized("a greeting of a rank that is no member, or with another rank as its source")
        if self.routes.should_accept(rank) and self.routes.get_relay(rank) is None:
            self._greet(rank)
        self._send_end(rank, member.num_sent)
        error = self._compare_settings(rank, body.get("settings"))
        if error is not None and member.admitted is not None:
            self.send_control(MessageKind.ABORT, rank, {"detail": str(error), "rank": rank})
            self._report_lost(rank, str(error))
            self.revoke_admission(rank, error)
            return
        member.has_greeted = True
        for relayed_rank in self.routes.list_ranks_behind(rank):
            self._greet(relayed_rank)
        if error is not None:
            self.mailbox.end(error)
        self._update_expected()
        if not self.missing_ranks:
            self.ready.set_result(None)
        if member.admitted is not None:
            self.mailbox.admit_sender(rank)
            member.admitted.set_result(None)

    def _compare_settings(self, rank: int, peer_settings: object) -> ProtocolError | None:
        """Compares a member's settings with this rank's; returns an error that names the first difference."""
        if not isinstance(peer_settings, dict):
            raise WireError("a greeting without settings")
        for name in sorted(self._settings.keys() | peer_settings.keys()):
            local_value, peer_value = self._settings.get(name), peer_settings.get(name)
            if local_value != peer_value:
                return ProtocolError(
                    f"ranks disagree on {name}: {local_value!r} on rank {self.rank}, {peer_value!r} on rank {rank}; "
                    "start all of them with the same command"
                )
        return None

    # --- losses and leaves ------------------------------------------------------------------------------------------

    def complete_leave(self, rank: int) -> None:
        """Ends a peer's membership once it has announced its leave and every message that it sent has arrived."""
        member = self.by_rank[rank]
        if member.num_announced is not None and member.num_received >= member.num_announced:
            self._mark_left(rank, member)

    def _mark_left(self, rank: int, member: ViewMember) -> None:
        member.is_gone = True
        self.mailbox.fail_from(rank, PeerLost(rank, self.leave_detail))

    def _mark_lost(self, rank: int, error: BaseException) -> None:
        """Marks a member as lost: ends the view if it needs all members, or else the waits for that member."""
        self.revoke_admission(rank, error)
        if rank in self.by_rank:
            self.by_rank[rank].is_gone = True
        if self.needs_all:
            self.mailbox.end(error)
        else:
            self.mailbox.fail_from(rank, error)

    def drop_member(self, rank: int, error: PeerLost) -> None:
        """Gives up a member and its connection."""
        self._mark_lost(rank, error)
        self._report_gone(rank, error.detail)
        self.transport.remove_peer(rank)

    def handle_close(self, rank: int) -> None:
        """Handles the end of a member's connection."""
        self._handle_gone(rank, CONNECTION_CLOSED)
        self._report_gone(rank, CONNECTION_CLOSED)

    def _handle_gone(self, rank: int, reason: str) -> None:
        """Ends the membership of an unreachable peer: it has left if it announced its leave, and is lost otherwise."""
        member = self.by_rank.get(rank)
        if member is None or member.is_gone:
            return
        if member.num_announced is not None:
            self._mark_left(rank, member)
        else:
            self._mark_lost(rank, PeerLost(rank, reason))

    def _report_gone(self, rank: int, reason: str) -> None:
        """Reports the loss of a peer to the ranks that reach it through this one; marks the ranks behind it as lost."""
        self._report_lost(rank, reason)
        for relayed_rank in self.routes.list_ranks_behind(rank):
            self._handle_gone(relayed_rank, f"rank {rank} is gone, which relayed its messages")

    def _report_lost(self, rank: int, reason: str) -> None:
        """Reports the loss of a peer to the ranks that reach it through this one, behind all its relayed messages."""
        self.relay.handle_lost(rank)
        for receiver in self.routes.list_ranks_served(rank):
            if receiver in self.present_ranks:
                body: dict[str, Json] = {"rank": rank, "token": self.routes.get_token(rank), "detail": reason}
                self.send_control(MessageKind.LOST, receiver, body, last=True)

    def _handle_lost_report(self, relay: int, body: Mapping[str, Any]) -> None:
        """Handles a relay's report that a rank behind it is lost."""
        rank = body.get("rank")
        if not self.needs_all and isinstance(rank, int) and self.routes.get_relay(rank) != relay:
            return  # it has another route since
        if not isinstance(rank, int) or self.routes.get_relay(rank) != relay:
            raise Unauthorized("a loss told by a member that does not relay")
        if body.get("token") == self.routes.get_token(rank):
            self._handle_gone(rank, f"rank {relay}, which relays its messages, says: {body.get('detail')}")
