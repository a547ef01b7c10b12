"""Virtual membership of an elastic view: members, and the connections between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableSequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

from farflung.comm.mailbox import Mailbox
from farflung.comm.members import PROCESS_ENDED
from farflung.errors import PeerLost
from farflung.tasks import Pending, create_failed

__all__ = ["Membership", "SendNotice"]

SendNotice: TypeAlias = Callable[[int, int, Callable[[], None]], None]
"""Sends a notice from one rank to another, and calls a function when it arrives."""


@dataclass(eq=False, slots=True)
class _Membership:
    """Membership of a rank from its admission until it leaves or is lost; each admission starts a new one."""

    rank: int
    mailbox: Mailbox
    peers: dict[int, _Membership]
    """Memberships that this member believes to be current, by rank."""
    is_ended: bool = False
    informed_ranks: set[int] = field(default_factory=set)
    """Ranks that have learnt of its end."""
    num_sending: int = 0
    """Number of its messages that are still being sent."""
    on_all_sent: Callable[[], None] | None = None


class _ReconnectRequest(NamedTuple):
    """Reconnection that a member waits for."""

    member: _Membership
    peer: _Membership
    relay: int | None
    completion: Pending[None]


class Membership:
    """Membership protocol of a virtual world: admission, end of membership, and notices between ranks.

    A member can send to an admitted rank from the arrival of its greeting to that of the notice of its end. An
    admitted rank knows all present members at once.

    Args:
      mailboxes: Mailboxes of all ranks; a rank's mailbox is replaced before the rank is admitted again.
      absent_ranks: Ranks that are not members at the start.
      send_notice: Sends a notice as a message without bytes.
      report_closed: Reports a closed connection, one link delay later.
    """

    def __init__(
        self,
        mailboxes: MutableSequence[Mailbox],
        absent_ranks: Collection[int],
        send_notice: SendNotice,
        report_closed: SendNotice,
    ) -> None:
        self._mailboxes, self._send_notice, self._report_closed = mailboxes, send_notice, report_closed
        members = [rank for rank in range(len(mailboxes)) if rank not in absent_ranks]
        self._members = {rank: _Membership(rank, mailboxes[rank], {}) for rank in members}
        for membership in self._members.values():
            membership.peers.update(self._members)
        self._connections: dict[frozenset[int], object] = {}
        """Identity of a connection by pair, once the first has been lost."""
        self._relays: dict[frozenset[int], int] = {}
        """Relays of pairs whose connection is broken."""
        self._relay_offers: set[tuple[frozenset[int], int]] = set()
        """Pairs and the relays that serve them."""
        self._requests: dict[tuple[int, int], _ReconnectRequest] = {}
        """Pending reconnections, by the rank that waits and its peer."""

    def __contains__(self, rank: int) -> bool:
        """Returns True if a rank is a member."""
        return rank in self._members

    def can_send(self, src: int, dst: int) -> bool:
        """Returns True if ``src`` is a member and believes ``dst`` to be one."""
        return src in self._members and dst in self._members[src].peers

    def get_connection(self, src: int, dst: int) -> object:
        """Returns the identity of the connection of two ranks; it changes when the connection is lost."""
        return self._connections.get(frozenset((src, dst)))

    def find_relay(self, src: int, dst: int) -> int | None:
        """Finds the relay between two ranks; ``None``: they are connected."""
        return self._relays.get(frozenset((src, dst)))

    def track_message(self, src: int, departure: Pending[None]) -> None:
        """Counts a message of a member until it has left."""
        membership = self._members[src]
        membership.num_sending += 1
        departure.add_done_callback(lambda _: self._handle_sent(membership))

    def admit(self, rank: int) -> None:
        """Admits a rank, for the first time or again."""
        members = list(self._members.values())
        membership = self._members[rank] = _Membership(rank, self._mailboxes[rank], dict(self._members))
        for member in members:
            self._send_notice(rank, member.rank, partial(self._handle_greeting, member, membership))

    def begin_leave(self, rank: int) -> None:
        """Ends the membership of a rank that leaves, once its messages have been sent."""
        membership = self._members.pop(rank)
        membership.is_ended, membership.on_all_sent = True, lambda: self._complete_leave(membership)
        if not membership.num_sending:
            self._complete_leave(membership)

    def remove_crashed(self, rank: int) -> None:
        """Ends the membership of a lost rank, and closes its connections."""
        membership = self._members.pop(rank)
        membership.is_ended = True
        self._announce_end(
            membership, PeerLost(rank, "its connection was closed from its end"), self._report_closed
        )

    # --- broken connections -----------------------------------------------------------------------------------------

    def reset_connection(self, rank: int, peer: int) -> None:
        """Closes a rank's end of its connection to a peer, which gets no notice; messages in flight are lost."""
        first, second = self._members.get(rank), self._members.get(peer)
        if first is not None and second is not None and self.find_relay(rank, peer) is None:
            self._connections[frozenset((rank, peer))] = object()
            self._drop_peer(first, second, PeerLost(peer, "its connection was closed from its end"))

    def reconnect(self, rank: int, peer: int, relay: int | None) -> Pending[None]:
        """Reconnects two members; see :meth:`farflung.types.Communicator.reconnect`.

        It takes two round trips, or one through a relay.
        """
        completion: Pending[None] = Pending()
        member, second, pair = self._members.get(rank), self._members.get(peer), frozenset((rank, peer))
        if member is None:
            return create_failed(PeerLost(peer, "it had left the run"))
        if second is None:
            error = PeerLost(peer, PROCESS_ENDED)
            self._send_notice(
                rank, peer, lambda: self._send_notice(peer, rank, lambda: completion.set_exception(error))
            )
            return completion
        if peer in member.peers:
            connection = self._connections[pair] = object()
            self._drop_peer(member, second, PeerLost(peer, "its connection was given up"))
            closed_error = PeerLost(rank, "its connection was closed from its end")

            def close() -> None:
                if self._connections[pair] is connection:
                    self._drop_peer(second, member, closed_error)

            self._send_notice(rank, peer, close)
        self._requests[rank, peer] = _ReconnectRequest(member, second, relay, completion)
        self._match_requests(pair)
        return completion

    def offer_relay(self, relay: int, rank_a: int, rank_b: int) -> None:
        """Offers a relay for a pair; see :meth:`farflung.types.Communicator.relay`."""
        pair = frozenset((rank_a, rank_b))
        self._relay_offers.add((pair, relay))
        self._match_requests(pair)

    def _match_requests(self, pair: frozenset[int]) -> None:
        """Matches the requests of two members that both wait for a reconnection."""
        low, high = sorted(pair)
        requests = [self._requests.get(ends) for ends in ((low, high), (high, low))]
        if None in requests or len({request.relay for request in requests if request is not None}) > 1:
            return
        low_request, high_request = (request for request in requests if request is not None)
        relay = low_request.relay
        if relay is not None and (pair, relay) not in self._relay_offers:
            return

        def complete() -> None:
            self._complete_reconnect(pair, low_request, high_request)

        if relay is None:
            self._relays.pop(pair, None)
            route = [high, low, high, low]
        else:
            route = [high, relay, low]
        self._send_along(route, complete)

    def _send_along(self, ranks: list[int], on_arrival: Callable[[], None]) -> None:
        """Sends a notice from each rank to the next, and then calls a function."""
        if len(ranks) == 1:
            on_arrival()
        else:
            self._send_notice(ranks[0], ranks[1], lambda: self._send_along(ranks[1:], on_arrival))

    def _complete_reconnect(
        self, pair: frozenset[int], low_request: _ReconnectRequest, high_request: _ReconnectRequest
    ) -> None:
        """Completes a reconnection at the lower rank, and one delay later at the higher."""
        low, high = low_request.member.rank, high_request.member.rank
        if (
            self._requests.get((low, high)) is not low_request
            or self._requests.get((high, low)) is not high_request
        ):
            return
        del self._requests[low, high], self._requests[high, low]
        if low_request.relay is not None:
            self._relays[pair] = low_request.relay
        self._connections[pair] = connection = object()

        def connect(request: _ReconnectRequest) -> None:
            if self._connections[pair] is connection and not (
                request.member.is_ended or request.peer.is_ended
            ):
                request.member.peers[request.peer.rank] = request.peer
                request.member.mailbox.admit_sender(request.peer.rank)
                request.completion.set_result(None)

        connect(low_request)
        self._send_along(
            [low, *([] if low_request.relay is None else [low_request.relay]), high],
            lambda: connect(high_request),
        )

    # --- end of a membership ----------------------------------------------------------------------------------------

    def _handle_sent(self, membership: _Membership) -> None:
        membership.num_sending -= 1
        if not membership.num_sending and membership.on_all_sent is not None:
            membership.on_all_sent()

    def _complete_leave(self, membership: _Membership) -> None:
        membership.on_all_sent = None
        self._announce_end(membership, PeerLost(membership.rank, "it had left the run"), self._send_notice)

    def _announce_end(self, membership: _Membership, error: PeerLost, send: SendNotice) -> None:
        for member in list(self._members.values()):
            send(membership.rank, member.rank, partial(self._handle_end, member, membership, error))

    def _handle_greeting(self, member: _Membership, newcomer: _Membership) -> None:
        """Handles a greeting at a member; an earlier membership of the newcomer's rank is lost."""
        if member.is_ended or member.rank in newcomer.informed_ranks:
            return
        earlier = member.peers.get(newcomer.rank)
        if earlier is not None:
            error = PeerLost(newcomer.rank, "its connection was closed from its end")
            self._handle_end(member, earlier, error)
        member.peers[newcomer.rank] = newcomer
        member.mailbox.admit_sender(newcomer.rank)

    def _handle_end(self, member: _Membership, peer: _Membership, error: PeerLost) -> None:
        """Handles the end of another's membership at a member."""
        peer.informed_ranks.add(member.rank)
        self._drop_peer(member, peer, error)

    def _drop_peer(self, member: _Membership, peer: _Membership, error: PeerLost) -> None:
        """Drops a peer at one member, and ends the routes through it."""
        if member.is_ended or member.peers.get(peer.rank) is not peer:
            return
        del member.peers[peer.rank]
        member.mailbox.fail_from(peer.rank, error)
        for pair, relay in list(self._relays.items()):
            ends = {rank: self._members[rank] for rank in pair if rank in self._members}
            if relay == peer.rank and member.rank in pair:
                for rank, affected_member in ends.items():
                    route_error = PeerLost(rank, f"rank {relay} is gone, which relayed its messages")
                    self._drop_peer(member, affected_member, route_error)
            elif relay == member.rank and peer.rank in pair:
                for rank, affected_member in ends.items():
                    route_error = PeerLost(peer.rank, f"rank {relay} has lost it, which relayed its messages")
                    self._send_notice(
                        relay, rank, partial(self._drop_peer, affected_member, peer, route_error)
                    )
