"""Who is in a view: the first meeting, members that come later, who has greeted and who is gone."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping

from farflung.comm.peer import Peer, check_peers
from farflung.comm.routes import Routes
from farflung.comm.transport import Listener, Transport
from farflung.comm.wire import Unauthorized, WireError
from farflung.errors import ProtocolError
from farflung.tasks import Pending
from farflung.types import Json

__all__ = ["Meeting"]


class Meeting(Listener):
    """The members of a view; see :class:`farflung.comm.View`, which says what they tell each other.

    Args:
      transport: by which they are reached.
      size: number of members.
      whole: whether all of them are needed.
      members: who is there at the first meeting, this one too; all when not given.
      settings: what must be equal on all members, by name.
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
        """Done when all have greeted."""
        self._whole = whole
        self._settings = {"number of replicas": size, **(settings or {})}
        self._members = set(range(size) if members is None else members)
        self._addresses: dict[int, str | None] = {}
        """Of the others, once it is known who they are; ``None``: it has no way in."""
        self._routes = Routes(transport.me)
        self._greeted: set[int] = set()
        self._late: dict[int, Pending[None]] = {}
        """Those that were admitted after the first meeting, done once they have greeted."""
        self._left: set[int] = set()
        if len(self._members) == 1:
            self.ready.set(None)
            transport.expects(0)

    @abstractmethod
    def _greet(self, rank: int) -> None:
        """Says to a member who this is, and with which settings."""

    @abstractmethod
    def _begin_anew(self, rank: int) -> None:
        """A member is about to come that was not there, or was another: nothing of before is its own."""

    def connect(self, peers: Iterable[Peer]) -> None:
        """Learns everybody's address and key; connects where it has to, and greets there.

        Raises:
          ConfigError: a key is not on this replica's list, or some encrypt and others do not; or two cannot reach each
            other, and have nobody who relays.
          ProtocolError: the peers do not make up a run.
        """
        others = [peer for peer in peers if peer.rank != self.rank]
        check_peers(self.transport.me, others, self.transport.keys)
        self._routes.meet(others)
        self._addresses = {peer.rank: peer.address for peer in others}
        self.transport.open([peer for peer in others if self._routes.relay(peer.rank) is None], self)
        self._expect()
        for peer in others:
            if self._routes.goes_to(peer.rank):
                self._greet(peer.rank)

    def admit(self, peer: Peer) -> Pending[None]:
        """Lets somebody in after the first meeting, or connects to it, as at that.

        A rank that has left, or was lost, may come again.

        Returns:
          Done once it has greeted, when :meth:`farflung.types.Communicator.arrival` tells too. Fails with a
          :class:`ProtocolError` where it has other settings: then it is told so, and is none of the members; with a
          :class:`PeerLost` where it is lost before, or does not come, see :meth:`dismiss`.

        Raises:
          ConfigError: its key is not on this replica's list, or it encrypts and others do not; or nobody relays between
            it and another.
          ProtocolError: the view is whole, or the rank is there already, or is none of the run's.
        """
        if self._whole:
            raise ProtocolError(
                f"rank {peer.rank} cannot come later: every exchange of this run needs all replicas"
            )
        if peer.rank == self.rank or peer.rank in self.present() or peer.rank >= self.size:
            raise ProtocolError(f"rank {peer.rank} of {self.size} is there already, or is none of the run's")
        check_peers(self.transport.me, [peer], self.transport.keys)
        self._routes.meet([peer], self._left - {peer.rank})
        self._begin_anew(peer.rank)
        self._greeted.discard(peer.rank)
        self._left.discard(peer.rank)
        self._members.add(peer.rank)
        admitted = self._late[peer.rank] = Pending()
        self._addresses[peer.rank] = peer.address
        relay = self._routes.relay(peer.rank)
        if relay is None:
            self.transport.open([peer], self)
        else:
            self.transport.dismiss(peer.rank)
        self._expect()
        if self._routes.goes_to(peer.rank) or relay in self.present():
            self._greet(peer.rank)
        return admitted

    def dismiss(self, rank: int, why: BaseException) -> None:
        """Whoever was admitted and has not greeted may not come any more."""
        if rank not in self._late or rank in self._greeted:
            return
        self.transport.dismiss(rank)
        self._members.discard(rank)
        self._addresses.pop(rank)
        self._expect()
        self._late.pop(rank).fail(why)

    def missing(self) -> list[int]:
        """The members that have not greeted yet, those behind a relay last."""
        missing = self._members - self._greeted - {self.rank}
        return sorted(missing, key=lambda rank: (self._routes.relay(rank) is not None, rank))

    def _expect(self) -> None:
        self.transport.expects(sum(map(self._routes.comes_from, self.missing())))

    def greeting_of(self, rank: int) -> str:
        """What a wait for ``rank`` to greet waits for, with what is known of why it has not."""
        if not self.transport.failed_at(rank):
            return f"its greeting{self._through(rank)}"
        return f"its greeting: {self._addresses[rank]} was reached, but did not prove to be that rank"

    def _has_greeted(self, rank: int) -> None:
        if rank not in self._greeted:
            raise Unauthorized("a message before a greeting")

    def present(self) -> set[int]:
        """Those who have greeted and are not gone."""
        return self._greeted - self._left

    def _unlike(self, rank: int, theirs: object) -> ProtocolError | None:
        """How a member's settings differ from this one's."""
        if not isinstance(theirs, dict):
            raise WireError("a greeting without settings")
        for name in sorted(self._settings.keys() | theirs.keys()):
            mine, other = self._settings.get(name), theirs.get(name)
            if mine != other:
                return ProtocolError(
                    f"ranks disagree on {name}: {mine!r} on rank {self.rank}, {other!r} on rank {rank}; "
                    "start all of them with the same command"
                )
        return None

    def _through(self, rank: int | None) -> str:
        """For messages to people: by whom a rank's messages come, where that is another."""
        relay = None if rank is None else self._routes.relay(rank)
        return "" if relay is None else f", through rank {relay}"
