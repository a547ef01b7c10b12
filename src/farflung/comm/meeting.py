"""Members of a view: first connections, admission, greetings and losses."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping

from typing_extensions import override

from farflung.comm.interface import how_to_be_reached
from farflung.comm.peer import Peer, check_peers
from farflung.comm.routes import Routes
from farflung.comm.transport import Listener, Transport
from farflung.comm.wire import Unauthorized, WireError
from farflung.errors import PeerLost, ProtocolError
from farflung.tasks import Pending, failed
from farflung.types import Json

__all__ = ["ENDED", "Meeting"]

ENDED = "no process listens at its address any more"
"""Error detail for a member whose process has ended."""


class Meeting(Listener):
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
        whole: bool,
        members: Iterable[int] | None,
        settings: Mapping[str, Json] | None,
    ) -> None:
        self.transport = transport
        self.rank, self.size = transport.me.rank, size
        self.ready: Pending[None] = Pending()
        """Done once every member has greeted."""
        self.is_whole = whole
        self._settings = {"number of replicas": size, **(settings or {})}
        self._members = set(range(size) if members is None else members)
        self._addresses: dict[int, str | None] = {}
        """Addresses of the peers, from :meth:`connect` on; None if the peer accepts no connections."""
        self.routes = Routes(transport.me)
        self._greeted: set[int] = set()
        self._late: dict[int, Pending[None]] = {}
        """Members admitted after :meth:`connect`; each is done once it has greeted."""
        self._left: set[int] = set()
        if len(self._members) == 1:
            self.ready.set(None)
            transport.expects(0)

    @abstractmethod
    def _greet(self, rank: int) -> None:
        """Sends this rank's greeting to a member: its rank and settings."""

    @abstractmethod
    def _give_up(self, rank: int) -> None:
        """Closes the connection to a member, which is lost."""

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
        check_peers(self.transport.me, remote_peers, self.transport.keys)
        self.routes.meet(remote_peers)
        self._addresses = {peer.rank: peer.address for peer in remote_peers}
        self.transport.open([peer for peer in remote_peers if self.routes.relay(peer.rank) is None], self)
        self._expect()
        for peer in remote_peers:
            if self.routes.goes_to(peer.rank):
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
        if self.is_whole:
            raise ProtocolError(
                f"rank {peer.rank} cannot join later: every exchange of this run needs all replicas"
            )
        if peer.rank == self.rank or peer.rank in self.present() or peer.rank >= self.size:
            raise ProtocolError(
                f"rank {peer.rank} of {self.size} is present already, or not a rank of this run"
            )
        check_peers(self.transport.me, [peer], self.transport.keys)
        self.routes.meet([peer], self._left - {peer.rank})
        return self._let_in(peer)

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
            return failed(PeerLost(rank, "its address is not known"))
        if rank in self.present():
            self._give_up(rank)
        self.routes.detour(self.rank, rank, relay)
        return self._let_in(self.routes.peer(rank), again=True)

    @override
    def ended(self, rank: int) -> None:
        self.dismiss(rank, PeerLost(rank, ENDED))

    def _let_in(self, peer: Peer, *, again: bool = False) -> Pending[None]:
        self._reset(peer.rank)
        self._greeted.discard(peer.rank)
        self._left.discard(peer.rank)
        self._members.add(peer.rank)
        admitted = self._late[peer.rank] = Pending()
        self._addresses[peer.rank] = peer.address
        relay = self.routes.relay(peer.rank)
        if relay is None:
            self.transport.open([peer], self, again=again)
        else:
            self.transport.dismiss(peer.rank)
        self._expect()
        if self.routes.goes_to(peer.rank) or relay in self.present():
            self._greet(peer.rank)
        return admitted

    def dismiss(self, rank: int, why: BaseException) -> None:
        """Revokes the admission of a member that has not greeted yet; its wait fails with ``error``."""
        if rank not in self._late or rank in self._greeted:
            return
        self.transport.dismiss(rank)
        self._members.discard(rank)
        self._addresses.pop(rank)
        self._expect()
        self._late.pop(rank).fail(why)

    def missing(self) -> list[int]:
        """Lists the members that have not greeted yet, those reached through a relay last."""
        ranks = self._members - self._greeted - {self.rank}
        return sorted(ranks, key=lambda rank: (self.routes.relay(rank) is not None, rank))

    def _expect(self) -> None:
        self.transport.expects(sum(map(self.routes.comes_from, self.missing())))

    def greeting_of(self, rank: int) -> str:
        """Describes the wait for a member's greeting, with its relay or the cause of the delay, for errors."""
        machine, host = self.routes.peer(rank).machine, self.transport.me.machine
        if machine is not None and host is not None and machine != host:
            return (
                f"its greeting: {self._addresses[rank]} is reached from {machine} alone, and this is {host}: "
                f"{how_to_be_reached()}"
            )
        if not self.transport.failed_at(rank):
            return f"its greeting{self.through(rank)}"
        return f"its greeting: {self._addresses[rank]} was reached, but did not prove to be that rank"

    def _has_greeted(self, rank: int) -> None:
        if rank not in self._greeted:
            raise Unauthorized("a message before a greeting")

    def present(self) -> set[int]:
        """Returns the members that have greeted and are neither lost nor have left."""
        return self._greeted - self._left

    def _unlike(self, rank: int, theirs: object) -> ProtocolError | None:
        """Compares a member's settings with this rank's; returns an error that names the first difference."""
        if not isinstance(theirs, dict):
            raise WireError("a greeting without settings")
        for name in sorted(self._settings.keys() | theirs.keys()):
            local_value, peer_value = self._settings.get(name), theirs.get(name)
            if local_value != peer_value:
                return ProtocolError(
                    f"ranks disagree on {name}: {local_value!r} on rank {self.rank}, {peer_value!r} on rank {rank}; "
                    "start all of them with the same command"
                )
        return None

    def through(self, rank: int | None) -> str:
        """Describes the relay of a rank's messages, for errors; empty if there is none."""
        relay = None if rank is None else self.routes.relay(rank)
        return "" if relay is None else f", through rank {relay}"
