"""The members of a view that is not whole, in virtual time, and which peers each member is connected to."""

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
    """A rank's membership from its admission until it leaves or is lost; a rank that is admitted again has another."""

    rank: int
    mailbox: Mailbox
    knows: dict[int, _Membership]
    """The memberships that this member believes to be current, by rank."""
    over: bool = False
    missed: set[int] = field(default_factory=set)
    """The ranks that have learnt of its end."""
    leaving: int = 0
    """The number of its messages that are still being sent."""
    when_all_left: Callable[[], None] | None = None


class _Wish(NamedTuple):
    """A reconnection that a member waits for."""

    member: _Membership
    peer: _Membership
    relay: int | None
    made: Pending[None]


class Membership:
    """Admits members, ends their membership, and carries the news between ranks.

    A member can send to an admitted rank once the rank's greeting has arrived, and keeps sending to a rank until the
    notice of its end has arrived. An admitted rank knows all present members at once.

    Args:
      mailboxes: of all ranks; a rank's mailbox is replaced before the rank is admitted again.
      absent: the ranks that are not members at the start.
      say: sends a notice as a message of no bytes.
      notice: reports a closed connection, one link delay later.
    """

    def __init__(
        self, mailboxes: MutableSequence[Mailbox], absent: Collection[int], say: Tell, notice: Tell
    ) -> None:
        self._mailboxes, self._say, self._notice = mailboxes, say, notice
        here = [rank for rank in range(len(mailboxes)) if rank not in absent]
        self._here = {rank: _Membership(rank, mailboxes[rank], {}) for rank in here}
        for membership in self._here.values():
            membership.knows.update(self._here)
        self._connections: dict[frozenset[int], object] = {}
        """By pair, once the first has been lost."""
        self._relays: dict[frozenset[int], int] = {}
        """The relays of pairs whose connection is broken."""
        self._served: set[tuple[frozenset[int], int]] = set()
        """Pairs and the relays that serve them."""
        self._wishes: dict[tuple[int, int], _Wish] = {}
        """The reconnections that have not been made, by the rank that waits and its peer."""

    def __contains__(self, rank: int) -> bool:
        """Whether a rank is a member."""
        return rank in self._here

    def reaches(self, src: int, dst: int) -> bool:
        """Whether ``src`` is a member and believes ``dst`` to be one."""
        return src in self._here and dst in self._here[src].knows

    def connection(self, src: int, dst: int) -> object:
        """Returns what is another object after the connection of two ranks was lost."""
        return self._connections.get(frozenset((src, dst)))

    def relay(self, src: int, dst: int) -> int | None:
        """Finds the relay between two ranks; ``None``: they are connected."""
        return self._relays.get(frozenset((src, dst)))

    def sent(self, src: int, left: Pending[None]) -> None:
        """Counts a message of a member's until it has left."""
        membership = self._here[src]
        membership.leaving += 1
        left.on_done(lambda _: self._one_left(membership))

    def comes(self, rank: int) -> None:
        """Admits a rank, for the first time or again."""
        others = list(self._here.values())
        membership = self._here[rank] = _Membership(rank, self._mailboxes[rank], dict(self._here))
        for other in others:
            self._say(rank, other.rank, partial(self._greeted, other, membership))

    def leaves(self, rank: int) -> None:
        """Ends the membership of a rank that leaves, once its messages have been sent."""
        membership = self._here.pop(rank)
        membership.over, membership.when_all_left = True, lambda: self._leave(membership)
        if not membership.leaving:
            self._leave(membership)

    def crashes(self, rank: int) -> None:
        """Ends the membership of a rank that is lost, and closes its connections."""
        membership = self._here.pop(rank)
        membership.over = True
        self._end(membership, PeerLost(rank, "its connection was closed from its end"), self._notice)

    # --- broken connections -----------------------------------------------------------------------------------------

    def reset(self, rank: int, peer: int) -> None:
        """Breaks the connection of two members at the first's end; what is on its way is lost."""
        one, other = self._here.get(rank), self._here.get(peer)
        if one is not None and other is not None and self.relay(rank, peer) is None:
            self._connections[frozenset((rank, peer))] = object()
            self._lose(one, other, PeerLost(peer, "its connection was closed from its end"))

    def reconnect(self, rank: int, peer: int, relay: int | None) -> Pending[None]:
        """See :meth:`farflung.types.Communicator.reconnect`: two round trips, one through a relay."""
        made: Pending[None] = Pending()
        member, other, pair = self._here.get(rank), self._here.get(peer), frozenset((rank, peer))
        if member is None:
            return failed(PeerLost(peer, "it had left the run"))
        if other is None:
            gone = PeerLost(peer, ENDED)
            self._say(rank, peer, lambda: self._say(peer, rank, lambda: made.fail(gone)))
            return made
        if peer in member.knows:
            connection = self._connections[pair] = object()
            self._lose(member, other, PeerLost(peer, "its connection was given up"))
            closed = PeerLost(rank, "its connection was closed from its end")

            def closes() -> None:
                if self._connections[pair] is connection:
                    self._lose(other, member, closed)

            self._say(rank, peer, closes)
        self._wishes[rank, peer] = _Wish(member, other, relay, made)
        self._meet(pair)
        return made

    def serve(self, relay: int, one: int, other: int) -> None:
        """See :meth:`farflung.types.Communicator.relay`."""
        pair = frozenset((one, other))
        self._served.add((pair, relay))
        self._meet(pair)

    def _meet(self, pair: frozenset[int]) -> None:
        """Connects two members again that both wait for it."""
        low, high = sorted(pair)
        wishes = [self._wishes.get(ends) for ends in ((low, high), (high, low))]
        if None in wishes or len({wish.relay for wish in wishes if wish is not None}) > 1:
            return
        below, above = (wish for wish in wishes if wish is not None)
        relay = below.relay
        if relay is not None and (pair, relay) not in self._served:
            return

        def made() -> None:
            self._made(pair, below, above)

        if relay is None:
            self._relays.pop(pair, None)
            trip = [high, low, high, low]
        else:
            trip = [high, relay, low]
        self._travel(trip, made)

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

        def connected(wish: _Wish) -> None:
            if self._connections[pair] is connection and not (wish.member.over or wish.peer.over):
                wish.member.knows[wish.peer.rank] = wish.peer
                wish.member.mailbox.welcome(wish.peer.rank)
                wish.made.set(None)

        connected(below)
        self._travel([low, *([] if below.relay is None else [below.relay]), high], lambda: connected(above))

    # --- the end of a membership ------------------------------------------------------------------------------------

    def _one_left(self, membership: _Membership) -> None:
        membership.leaving -= 1
        if not membership.leaving and membership.when_all_left is not None:
            membership.when_all_left()

    def _leave(self, membership: _Membership) -> None:
        membership.when_all_left = None
        self._end(membership, PeerLost(membership.rank, "it had left the run"), self._say)

    def _end(self, membership: _Membership, error: PeerLost, tell: Tell) -> None:
        for other in list(self._here.values()):
            tell(membership.rank, other.rank, partial(self._parted, other, membership, error))

    def _greeted(self, member: _Membership, newcomer: _Membership) -> None:
        """Handles a greeting at a member; an earlier membership of the newcomer's rank is lost."""
        if member.over or member.rank in newcomer.missed:
            return
        before = member.knows.get(newcomer.rank)
        if before is not None:
            error = PeerLost(newcomer.rank, "its connection was closed from its end")
            self._parted(member, before, error)
        member.knows[newcomer.rank] = newcomer
        member.mailbox.welcome(newcomer.rank)

    def _parted(self, member: _Membership, gone: _Membership, error: PeerLost) -> None:
        """Handles at a member the end of another's membership."""
        gone.missed.add(member.rank)
        self._lose(member, gone, error)

    def _lose(self, member: _Membership, gone: _Membership, error: PeerLost) -> None:
        """Ends a connection at one end, and the routes of which it is a part."""
        if member.over or member.knows.get(gone.rank) is not gone:
            return
        del member.knows[gone.rank]
        member.mailbox.fail_from(gone.rank, error)
        for pair, relay in list(self._relays.items()):
            ends = {rank: self._here[rank] for rank in pair if rank in self._here}
            if relay == gone.rank and member.rank in pair:
                for rank, other in ends.items():
                    behind = PeerLost(rank, f"rank {relay} is gone, which relayed its messages")
                    self._lose(member, other, behind)
            elif relay == member.rank and gone.rank in pair:
                for rank, other in ends.items():
                    behind = PeerLost(gone.rank, f"rank {relay} has lost it, which relayed its messages")
                    self._say(relay, rank, partial(self._lose, other, gone, behind))
