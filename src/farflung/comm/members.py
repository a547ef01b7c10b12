"""Members of a view: first connections, admission, greetings and losses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping

from typing_extensions import override

from farflung.comm.interface import explain_reachability
from farflung.comm.peer import Peer, check_peers
from farflung.comm.routes import RoutingTable
from farflung.comm.transport import Listener, Transport
from farflung.comm.wire import Unauthorized, WireError
from farflung.errors import PeerLost, ProtocolError
from farflung.tasks import Pending, create_failed
from farflung.types import Json

__all__ = ["PROCESS_ENDED", "ViewMembers"]

PROCESS_ENDED = "no process listens at its address any more"
"""Error detail for a member whose process has ended."""


class ViewMembers(Listener):
    """Members of a view; :class:`farflung.comm.ViewSession` adds their messages.

    Args:
      transport: Transport of the view's messages.
      size: World size.
      needs_all_members: True if every member is needed.
      members: Initial members, including this rank; all ranks when not given.
      settings: Values that must be equal on all members, by name.
    """

    def __init__(
        self,
        transport: Transport,
        size: int,
        *,
        needs_all_members: bool,
        members: Iterable[int] | None,
        settings: Mapping[str, Json] | None,
    ) -> None:
        self.transport = transport
        self.rank, self.size = transport.local_peer.rank, size
        self.ready: Pending[None] = Pending()
        """Done once every member has greeted."""
        self.needs_all_members = needs_all_members
        self._settings = {"number of replicas": size, **(settings or {})}
        self._members = set(range(size) if members is None else members)
        self._addresses: dict[int, str | None] = {}
        """Addresses of the peers, from :meth:`connect` on; None if the peer accepts no connections."""
        self.routes = RoutingTable(transport.local_peer)
        self._greeted: set[int] = set()
        self._admissions: dict[int, Pending[None]] = {}
        """Members admitted after :meth:`connect`; each is done once it has greeted."""
        self._left_ranks: set[int] = set()
        if len(self._members) == 1:
            self.ready.set_result(None)
            transport.set_expected(0)

    @abstractmethod
    def _greet(self, rank: int) -> None:
        """Sends this rank's greeting to a member: its rank and settings."""

    @abstractmethod
    def _drop_connection(self, rank: int) -> None:
        """Drops the present connection to a member before a reconnection; waits for it fail."""

    @abstractmethod
    def _reset(self, rank: int) -> None:
        """Clears the state of earlier holders of a rank."""

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
        self._addresses = {peer.rank: peer.address for peer in remote_peers}
        self.transport.connect_peers(
            [peer for peer in remote_peers if self.routes.get_relay(peer.rank) is None], self
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
        if self.needs_all_members:
            raise ProtocolError(
                f"rank {peer.rank} cannot join later: every exchange of this run needs all replicas"
            )
        if peer.rank == self.rank or peer.rank in self.get_present_ranks() or peer.rank >= self.size:
            raise ProtocolError(
                f"rank {peer.rank} of {self.size} is present already, or not a rank of this run"
            )
        check_peers(self.transport.local_peer, [peer], self.transport.keys)
        self.routes.add_peers([peer], self._left_ranks - {peer.rank})
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
        if rank in self.get_present_ranks():
            self._drop_connection(rank)
        self.routes.set_detour(self.rank, rank, relay)
        return self._admit_peer(self.routes.get_peer(rank), is_reconnect=True)

    @override
    def handle_process_end(self, rank: int) -> None:
        self.revoke_admission(rank, PeerLost(rank, PROCESS_ENDED))

    def _admit_peer(self, peer: Peer, *, is_reconnect: bool = False) -> Pending[None]:
        self._reset(peer.rank)
        self._greeted.discard(peer.rank)
        self._left_ranks.discard(peer.rank)
        self._members.add(peer.rank)
        admitted = self._admissions[peer.rank] = Pending()
        self._addresses[peer.rank] = peer.address
        relay = self.routes.get_relay(peer.rank)
        if relay is None:
            self.transport.connect_peers([peer], self, is_reconnect=is_reconnect)
        else:
            self.transport.remove_peer(peer.rank)
        self._update_expected()
        if self.routes.should_connect_to(peer.rank) or relay in self.get_present_ranks():
            self._greet(peer.rank)
        return admitted

    def revoke_admission(self, rank: int, error: BaseException) -> None:
        """Revokes the admission of a member that has not greeted yet; its wait fails with ``error``."""
        if rank not in self._admissions or rank in self._greeted:
            return
        self.transport.remove_peer(rank)
        self._members.discard(rank)
        self._addresses.pop(rank)
        self._update_expected()
        self._admissions.pop(rank).set_exception(error)

    def list_missing(self) -> list[int]:
        """Lists the members that have not greeted yet, those reached through a relay last."""
        ranks = self._members - self._greeted - {self.rank}
        return sorted(ranks, key=lambda rank: (self.routes.get_relay(rank) is not None, rank))

    def _update_expected(self) -> None:
        self.transport.set_expected(sum(map(self.routes.should_accept, self.list_missing())))

    def describe_greeting(self, rank: int) -> str:
        """Describes the wait for a member's greeting, with its relay or the cause of the delay, for errors."""
        machine, host = self.routes.get_peer(rank).machine, self.transport.local_peer.machine
        if machine is not None and host is not None and machine != host:
            return (
                f"its greeting: {self._addresses[rank]} is reached from {machine} alone, and this is {host}: "
                f"{explain_reachability()}"
            )
        address, relay = self._addresses[rank], self.describe_relay(rank)
        if self.transport.has_failed_auth(rank):
            return f"its greeting: {address} was reached, but did not prove to be that rank"
        if relay or address is None:
            return f"its greeting{relay}"
        return f"its greeting: is it running, and can {address} be reached from here?"

    def _check_greeted(self, rank: int) -> None:
        if rank not in self._greeted:
            raise Unauthorized("a message before a greeting")

    def get_present_ranks(self) -> set[int]:
        """Returns the members that have greeted and are neither lost nor have left."""
        return self._greeted - self._left_ranks

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

    def describe_relay(self, rank: int | None) -> str:
        """Describes the relay of a rank's messages, for errors; empty if there is none."""
        relay = None if rank is None else self.routes.get_relay(rank)
        return "" if relay is None else f", through rank {relay}"
