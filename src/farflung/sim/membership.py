"""Virtual membership of an elastic view: members, and the connections between them."""

from __future__ import annotations

from collections.abc import Callable, Collection, MutableSequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, TypeAlias

from farflung.comm.mailbox import Mailbox
from farflung.comm.meeting import ENDED
from farflung.errors import PeerLost
from farflung.tasks import Pending, failed

__all__ = ["Membership", "Tell"]

Tell: TypeAlias = Callable[[int, int, Callable[[], None]], None]
"""Sends a notice from one rank to another, and calls a function when it arrives."""


@dataclass(eq=False, slots=True)
class _Membership:
    """Membership of a rank from its admission until it leaves or is lost; each admission starts a new one."""

    rank: int
    mailbox: Mailbox
    knows: dict[int, _Membership]
    """Memberships that this member believes to be current, by rank."""
    over: bool = False
    missed: set[int] = field(default_factory=set)
    """Ranks that have learnt of its end."""
    leaving: int = 0
    """Number of its messages that are still being sent."""
    when_all_left: Callable[[], None] | None = None


class _Wish(NamedTuple):
    """Reconnection that a member waits for."""

    member: _Membership
    peer: _Membership
    relay: int | None
    made: Pending[None]


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
        self, mailboxes: MutableSequence[Mailbox], absent: Collection[int], say: Tell, notice: Tell
    ) -> None:
        self._mailboxes, self._say, self._notice = mailboxes, say, notice
        members = [rank for rank in range(len(mailboxes)) if rank not in absent]
        self._here = {rank: _Membership(rank, mailboxes[rank], {}) for rank in members}
        for membership in self._here.values():
            membership.knows.update(self._here)
        self._connections: dict[frozenset[int], object] = {}
        """Identity of a connection by pair, once the first has been lost."""
        self._relays: dict[frozenset[int], int] = {}
        """Relays of pairs whose connection is broken."""
        self._served: set[tuple[frozenset[int], int]] = set()
        """Pairs and the relays that serve them."""
        self._wishes: dict[tuple[int, int], _Wish] = {}
        """Pending reconnections, by the rank that waits and its peer."""

    def __contains__(self, rank: int) -> bool:
        """Returns True if a rank is a member."""
        return rank in self._here

    def reaches(self, src: int, dst: int) -> bool:
        """Returns True if ``src`` is a member and believes ``dst`` to be one."""
        return src in self._here and dst in self._here[src].knows

    def connection(self, src: int, dst: int) -> object:
        """Returns the identity of the connection of two ranks; it changes when the connection is lost."""
        return self._connections.get(frozenset((src, dst)))

    def relay(self, src: int, dst: int) -> int | None:
        """Finds the relay between two ranks; ``None``: they are connected."""
        return self._relays.get(frozenset((src, dst)))

    def sent(self, src: int, left: Pending[None]) -> None:
        """Counts a message of a member until it has left."""
        membership = self._here[src]
        membership.leaving += 1
        left.on_done(lambda _: self._one_left(membership))

    def comes(self, rank: int) -> None:
        """Admits a rank, for the first time or again."""
        members = list(self._here.values())
        membership = self._here[rank] = _Membership(rank, self._mailboxes[rank], dict(self._here))
        for member in members:
            self._say(rank, member.rank, partial(self._greeted, member, membership))

    def leaves(self, rank: int) -> None:
        """Ends the membership of a rank that leaves, once its messages have been sent."""
        membership = self._here.pop(rank)
        membership.over, membership.when_all_left = True, lambda: self._leave(membership)
        if not membership.leaving:
            self._leave(membership)

    def crashes(self, rank: int) -> None:
        """Ends the membership of a lost rank, and closes its connections."""
        membership = self._here.pop(rank)
        membership.over = True
        self._end(membership, PeerLost(rank, "its connection was closed from its end"), self._notice)

    # --- broken connections -----------------------------------------------------------------------------------------

    def reset(self, rank: int, peer: int) -> None:
        """Breaks the connection of two members at the first one's end; messages in flight are lost."""
        first, second = self._here.get(rank), self._here.get(peer)
        if first is not None and second is not None and self.relay(rank, peer) is None:
            self._connections[frozenset((rank, peer))] = object()
            self._lose(first, second, PeerLost(peer, "its connection was closed from its end"))

    def reconnect(self, rank: int, peer: int, relay: int | None) -> Pending[None]:
        """Reconnects two members; see :meth:`farflung.types.Communicator.reconnect`.

        It takes two round trips, or one through a relay.
        """
        completion: Pending[None] = Pending()
        member, second, pair = self._here.get(rank), self._here.get(peer), frozenset((rank, peer))
        if member is None:
            return failed(PeerLost(peer, "it had left the run"))
        if second is None:
            error = PeerLost(peer, ENDED)
            self._say(rank, peer, lambda: self._say(peer, rank, lambda: completion.fail(error)))
            return completion
        if peer in member.knows:
            connection = self._connections[pair] = object()
            self._lose(member, second, PeerLost(peer, "its connection was given up"))
            closed_error = PeerLost(rank, "its connection was closed from its end")

            def close() -> None:
                if self._connections[pair] is connection:
                    self._lose(second, member, closed_error)

            self._say(rank, peer, close)
        self._wishes[rank, peer] = _Wish(member, second, relay, completion)
        self._meet(pair)
        return completion

    def serve(self, relay: int, one: int, other: int) -> None:
        """Offers a relay for a pair; see :meth:`farflung.types.Communicator.relay`."""
        pair = frozenset((one, other))
        self._served.add((pair, relay))
        self._meet(pair)

    def _meet(self, pair: frozenset[int]) -> None:
        """Matches the requests of two members that both wait for a reconnection."""
        low, high = sorted(pair)
        requests = [self._wishes.get(ends) for ends in ((low, high), (high, low))]
        if None in requests or len({request.relay for request in requests if request is not None}) > 1:
            return
        low_request, high_request = (request for request in requests if request is not None)
        relay = low_request.relay
        if relay is not None and (pair, relay) not in self._served:
            return

        def complete() -> None:
            self._made(pair, low_request, high_request)

        if relay is None:
            self._relays.pop(pair, None)
            route = [high, low, high, low]
        else:
            route = [high, relay, low]
        self._travel(route, complete)

    def _travel(self, ranks: list[int], then: Callable[[], None]) -> None:
        """Sends a notice from each rank to the next, and then calls a function."""
        if len(ranks) == 1:
            then()
        else:
            self._say(ranks[0], ranks[1], lambda: self._travel(ranks[1:], then))

    def _made(self, pair: frozenset[int], below: _Wish, above: _Wish) -> None:
        """Completes a reconnection at the lower rank, and one delay later at the higher."""
        low, high = below.member.rank, above.member.rank
        if self._wishes.get((low, high)) is not below or self._wishes.get((high, low)) is not above:
            return
        del self._wishes[low, high], self._wishes[high, low]
        if below.relay is not None:
            self._relays[pair] = below.relay
        self._connections[pair] = connection = object()

        def connect(request: _Wish) -> None:
            if self._connections[pair] is connection and not (request.member.over or request.peer.over):
                request.member.knows[request.peer.rank] = request.peer
                request.member.mailbox.welcome(request.peer.rank)
                request.made.set(None)

        connect(below)
        self._travel([low, *([] if below.relay is None else [below.relay]), high], lambda: connect(above))

    # --- end of a membership ----------------------------------------------------------------------------------------

    def _one_left(self, membership: _Membership) -> None:
        membership.leaving -= 1
        if not membership.leaving and membership.when_all_left is not None:
            membership.when_all_left()

    def _leave(self, membership: _Membership) -> None:
        membership.when_all_left = None
        self._end(membership, PeerLost(membership.rank, "it had left the run"), self._say)

    def _end(self, membership: _Membership, error: PeerLost, tell: Tell) -> None:
        for member in list(self._here.values()):
            tell(membership.rank, member.rank, partial(self._parted, member, membership, error))

    def _greeted(self, member: _Membership, newcomer: _Membership) -> None:
        """Handles a greeting at a member; an earlier membership of the newcomer's rank is lost."""
        if member.over or member.rank in newcomer.missed:
            return
        earlier = member.knows.get(newcomer.rank)
        if earlier is not None:
            error = PeerLost(newcomer.rank, "its connection was closed from its end")
            self._parted(member, earlier, error)
        member.knows[newcomer.rank] = newcomer
        member.mailbox.welcome(newcomer.rank)

    def _parted(self, member: _Membership, gone: _Membership, error: PeerLost) -> None:
        """Handles the end of another's membership at a member."""
        gone.missed.add(member.rank)
        self._lose(member, gone, error)

    def _lose(self, member: _Membership, gone: _Membership, error: PeerLost) -> None:
        """Drops a peer at one member, and ends the routes through it."""
        if member.over or member.knows.get(gone.rank) is not gone:
            return
        del member.knows[gone.rank]
        member.mailbox.fail_from(gone.rank, error)
        for pair, relay in list(self._relays.items()):
            ends = {rank: self._here[rank] for rank in pair if rank in self._here}
            if relay == gone.rank and member.rank in pair:
                for rank, affected_member in ends.items():
                    route_error = PeerLost(rank, f"rank {relay} is gone, which relayed its messages")
                    self._lose(member, affected_member, route_error)
            elif relay == member.rank and gone.rank in pair:
                for rank, affected_member in ends.items():
                    route_error = PeerLost(gone.rank, f"rank {relay} has lost it, which relayed its messages")
                    self._say(relay, rank, partial(self._lose, affected_member, gone, route_error))
