"""Routes between ranks: a direct connection, or a relay that both ranks are connected to."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from farflung.comm.peer import Peer, should_connect
from farflung.errors import ConfigError

__all__ = ["RoutingTable"]


class RoutingTable:
    """Routes between the members of a view; all members compute equal ones.

    Between two ranks that accept no connections, the lowest rank that accepts them relays. The relay of a pair
    is fixed at the meeting at which the second of them joins, so later members do not change it. If the
    connection of a pair breaks, another member may become its relay; see :meth:`set_detour`.

    Args:
      local_peer: Peer of this rank.
    """

    def __init__(self, local_peer: Peer) -> None:
        self._local_peer = local_peer
        self._peers = {local_peer.rank: local_peer}
        self._meetings = {local_peer.rank: 0}
        """Number of the meeting at which each rank joined."""
        self._relays: list[int | None] = []
        """Relay by meeting."""
        self._detours: dict[frozenset[int], int] = {}
        """Relays of pairs whose connection is broken."""
        self.next_hops: dict[int, int] = {}
        """Next hop on the route to each rank: its relay, or the rank itself."""

    def add_peers(self, peers: Sequence[Peer], lost_ranks: Collection[int] = ()) -> None:
        """Adds peers; one whose rank is known already replaces the earlier peer.

        Args:
          peers: Peers that join.
          lost_ranks: Ranks that have left or were lost, which relay no more.

        Raises:
          ConfigError: no rank can relay between two of them.
        """
        updated = {**self._peers, **{peer.rank: peer for peer in peers}}
        present = [updated[rank] for rank in sorted(updated) if rank not in lost_ranks]
        relay = next((peer.rank for peer in present if peer.address is not None), None)
        hidden = [peer.rank for peer in present if peer.address is None]
        if relay is None and len(hidden) > 1:
            raise ConfigError(
                f"ranks {hidden[0]} and {hidden[1]} advertise no address, and neither does any other rank: make one of "
                "them reachable (--port, --advertise HOST:PORT)"
            )
        self._meetings.update({peer.rank: len(self._relays) for peer in peers})
        self._relays.append(relay)
        self._peers = updated
        self._update_next_hops()

    def set_detour(self, rank_a: int, rank_b: int, relay: int | None) -> None:
        """Sets the relay of two ranks whose connection is broken; None restores their first route."""
        if relay is None:
            self._detours.pop(frozenset((rank_a, rank_b)), None)
        else:
            self._detours[frozenset((rank_a, rank_b))] = relay
        self._update_next_hops()

    def _update_next_hops(self) -> None:
        for rank in self._peers:
            relay = self.get_relay(rank)
            self.next_hops[rank] = rank if relay is None else relay

    def __contains__(self, rank: int) -> bool:
        return rank in self._peers

    def get_peer(self, rank: int) -> Peer:
        return self._peers[rank]

    def get_token(self, rank: int) -> str:
        """Returns the hex token that distinguishes a rank's peer from earlier ones of that rank."""
        return self._peers[rank].token.hex()

    def should_connect_to(self, rank: int) -> bool:
        """Returns True if this rank connects to ``rank``."""
        return should_connect(self._local_peer, self._peers[rank])

    def should_accept(self, rank: int) -> bool:
        """Returns True if ``rank`` connects to this rank."""
        return should_connect(self._peers[rank], self._local_peer)

    def find_relay(self, rank_a: int, rank_b: int) -> int | None:
        """Finds the relay between two ranks; None if they need none, or one is unknown."""
        if rank_a == rank_b or not {rank_a, rank_b} <= self._peers.keys():
            return None
        if (detour := self._detours.get(frozenset((rank_a, rank_b)))) is not None:
            return detour
        if self.can_connect(rank_a, rank_b):
            return None
        return self._relays[max(self._meetings[rank_a], self._meetings[rank_b])]

    def can_connect(self, rank_a: int, rank_b: int) -> bool:
        """Returns True if one of two ranks can connect to the other."""
        return any(rank in self._peers and self._peers[rank].address is not None for rank in (rank_a, rank_b))

    def get_relay(self, rank: int) -> int | None:
        """Returns the relay between this rank and ``rank``; None if they need none, or ``rank`` is unknown."""
        return self.find_relay(self._local_peer.rank, rank)

    def describe_relay(self, rank: int | None) -> str:
        """Describes the relay of a rank's messages, for errors; empty if there is none."""
        relay = None if rank is None else self.get_relay(rank)
        return "" if relay is None else f", through rank {relay}"

    def list_ranks_behind(self, relay: int) -> list[int]:
        """Lists the ranks that this rank reaches through ``relay``."""
        return [rank for rank in sorted(self._peers) if self.get_relay(rank) == relay]

    def list_ranks_served(self, rank: int) -> list[int]:
        """Lists the ranks that ``rank`` reaches through this rank."""
        return [peer for peer in sorted(self._peers) if self.find_relay(rank, peer) == self._local_peer.rank]
