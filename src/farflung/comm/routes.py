"""Which way messages between two replicas take: over a connection of theirs, or through a third that both reach."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from farflung.comm.peer import Peer, connects
from farflung.errors import ConfigError

__all__ = ["Routes"]


class Routes:
    """The ways between the members of a view, as all of them find them.

    Of two that nobody can connect to, the lowest rank that can be connected to relays the messages. It is found when
    the two meet, so whoever comes later changes nothing of it.

    Args:
      me: this replica.
    """

    def __init__(self, me: Peer) -> None:
        self._me = me
        self._peers = {me.rank: me}
        self._met = {me.rank: 0}
        """At which of the meetings so far each was first there."""
        self._relays: list[int | None] = []
        """By meeting."""
        self._hops: dict[int, int] = {}
        """To whom this replica sends what is for each; every message asks."""

    def meet(self, peers: Sequence[Peer], gone: Collection[int] = ()) -> None:
        """Learns of some; those who are there again are others than before.

        Args:
          peers: who they are.
          gone: those known before who relay nothing any more.

        Raises:
          ConfigError: nobody can relay between two of them.
        """
        known = {**self._peers, **{peer.rank: peer for peer in peers}}
        here = [known[rank] for rank in sorted(known) if rank not in gone]
        relay = next((peer.rank for peer in here if peer.address is not None), None)
        hidden = [peer.rank for peer in here if peer.address is None]
        if relay is None and len(hidden) > 1:
            raise ConfigError(
                f"ranks {hidden[0]} and {hidden[1]} advertise no way in, and no other rank has one: let one of them be "
                "reached (--port, --advertise HOST:PORT)"
            )
        self._met.update({peer.rank: len(self._relays) for peer in peers})
        self._relays.append(relay)
        self._peers = known
        for rank in known:
            relay = self.relay(rank)
            self._hops[rank] = rank if relay is None else relay

    def __contains__(self, rank: int) -> bool:
        """Whether a rank is known."""
        return rank in self._peers

    def token(self, rank: int) -> str:
        """What tells a replica from those that had its rank before it; in hex."""
        return self._peers[rank].token.hex()

    def goes_to(self, rank: int) -> bool:
        """Whether this replica connects to another."""
        return connects(self._me, self._peers[rank])

    def comes_from(self, rank: int) -> bool:
        """Whether another connects to this replica."""
        return connects(self._peers[rank], self._me)

    def between(self, one: int, other: int) -> int | None:
        """Who relays between two; ``None``: nobody has to, or one of them is not known."""
        if one == other or not {one, other} <= self._peers.keys():
            return None
        if any(self._peers[rank].address is not None for rank in (one, other)):
            return None
        return self._relays[max(self._met[one], self._met[other])]

    def relay(self, rank: int) -> int | None:
        """Who relays between this replica and another."""
        return self.between(self._me.rank, rank)

    def next_hop(self, rank: int) -> int:
        """To whom this replica sends what is for ``rank``."""
        return self._hops.get(rank, rank)

    def behind(self, relay: int) -> list[int]:
        """Those whom this replica reaches through ``relay``."""
        return [rank for rank in sorted(self._peers) if self.relay(rank) == relay]

    def relayed_to(self, rank: int) -> list[int]:
        """Those whom ``rank`` reaches through this replica."""
        return [other for other in sorted(self._peers) if self.between(rank, other) == self._me.rank]
