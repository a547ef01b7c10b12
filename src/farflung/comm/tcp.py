"""TCP transport between real processes, encrypted with TLS 1.3 between machines.

One rank of each pair connects (:func:`farflung.comm.peer.should_connect`), so only the other must be reachable, at
one port. Authentication of a connection is in :mod:`farflung.comm.handshake`.

There are no heartbeats: TCP itself survives a network cut. Only a deadline gives up a slow or silent peer,
whereas a connection that the peer closes is reported at once.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import resource
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, get_args

from torch import Tensor

from farflung.comm.endpoint import MOST_CONNECTIONS, NO_WAY_IN, advertised
from farflung.comm.entrance import Entrance, Remote
from farflung.comm.framing import SEALED_PIECE_NBYTES
from farflung.comm.interface import LOOPBACK, is_loopback, tcp
from farflung.comm.keys import Keys
from farflung.comm.link import Link, Path, State
from farflung.comm.loop import Loop
from farflung.comm.peer import Peer, connects
from farflung.comm.pool import Pool
from farflung.comm.records import CONTROL, FIRST, LAST, Landings, Receiver
from farflung.comm.transport import Listener, Traffic
from farflung.comm.wire import Frame, Head, Message, WireError
from farflung.errors import ConfigError, PeerLost
from farflung.network.tcp import LARGEST_WINDOW_BITS, CongestionControl, window_share_bps
from farflung.tasks import Pending, failed

__all__ = ["TcpTransport"]

LINGER_S = 5.0
"""Seconds without any byte sent after which a closing transport gives up; for removed peers, seconds in all."""
OTHERS_S = 1.0
"""Seconds that the other connections to a peer may take to end, once one of them has."""
MOST_UNASKED = 16
"""Most connections to a peer if no number was given."""
WIDEN_S = 2.0
"""Busy seconds after which the transport decides if more connections would help."""
WORTH = 1.25
"""Speedup that twice as many connections must reach."""
SHORT_S = 0.005
"""Round trip below which one connection is enough, in seconds."""
_BACKLOG = 128
_ENOUGH_DESCRIPTORS = 1 << 16
_RESERVE = 256
"""Descriptors for everything but members' connections: files, threads, unauthenticated connections."""


class TcpTransport:
    """TCP connections of one process; see :class:`farflung.comm.transport.Transport`.

    Args:
      rank: Rank of this process.
      size: Number of processes of the run.
      interface: Address to listen on, loopback by default.
      ports: Candidate ports, of which the first free one is used; 0 is any.
      advertise: Host, or host and port, by which peers reach this process if that differs from the listening address:
        behind port forwarding, in a container. ``"none"``: no peer can connect, and the process does not listen.
      keys: Keys of this process, with which everything is encrypted. Required off loopback.
      allow_late: True if peers may come after the first meeting.
      connections: Number of connections to each peer for bulk; None adds them while they help, see :meth:`handle_busy`.

    Raises:
      ConfigError: the address does not belong to this machine, or is not loopback and there are no keys; or
        this process may not open enough files.
    """

    listener: Listener
    """Receiver of events of members, from :meth:`connect_peers` on."""

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        interface: str = LOOPBACK,
        ports: Sequence[int] = (0,),
        advertise: str | None = None,
        keys: Keys | None = None,
        later: bool = False,
        connections: int | None = None,
    ) -> None:
        is_local = is_loopback(interface)
        if not is_local and keys is None:
            raise ConfigError(
                f"interface {interface}: nothing leaves this machine without encryption, which takes keys"
            )
        _raise_limit(size, connections or 1)
        self.keys = keys
        self.refused = self.turned_away = 0
        self.max_nbytes = 1 << 31
        self._said_at = 1
        """Number of refusals at which they are logged next."""
        self._connections = connections
        self._remotes: dict[int, Remote] = {}
        self._leaving: set[Link] = set()
        """Connections of removed peers that still have bytes to send."""
        self._busy: set[int] = set()
        """Ranks with possibly queued bytes since the last :meth:`poll`."""
        self._closes = False
        self.scratch = memoryview(bytearray(SEALED_PIECE_NBYTES))
        """Buffer for encrypted bytes on their way to TLS."""
        self._pool = Pool()
        address: str | None = None
        server_socket = None if advertise == NO_WAY_IN else _door(interface, ports, size + _BACKLOG)
        if server_socket is not None:
            port = server_socket.getsockname()[1]
            try:
                address = f"{tcp(interface)}:{port}" if advertise is None else advertised(advertise, port)
            except ConfigError:
                server_socket.close()
                raise
        machine = socket.gethostname() if is_local and advertise is None else None
        self.me = Peer(rank, address, secrets.token_bytes(16), keys.public if keys else None, machine)
        self._loop = Loop()
        self.entrance = Entrance(self, self._loop, self._remotes, server_socket, size - 1, later)
        _open.add(self)

    # --- members ----------------------------------------------------------------------------------------------------

    def open(self, others: Sequence[Peer], listener: Listener, *, again: bool = False) -> None:
        self.listener = listener
        self.entrance.open()
        for peer in others:
            self.dismiss(peer.rank)
            buffers = Landings(partial(self._memory, peer.rank), lambda: self.max_nbytes)
            self._remotes[peer.rank] = Remote(peer, buffers, wanted=self._connections or 1, again=again)
        self.entrance.tls = None
        for peer in others:
            if connects(self.me, peer) or (again and peer.address is not None):
                self.entrance.dial(self._remotes[peer.rank], 0)
        self.entrance.mind()

    def _memory(self, rank: int, head: Head, number: int) -> Tensor:
        """Allocates a large tensor of a message, in the posted receive buffer if there is one."""
        nbytes = head.large[number]
        buffer = None if number else self.listener.room(rank, head, nbytes)
        return self._pool.tensor(nbytes) if buffer is None else buffer

    def dismiss(self, rank: int) -> None:
        member = self._remotes.pop(rank, None)
        if member is None:
            return
        self.entrance.tls = None
        for connection in [connection for connection in self.entrance.early if connection.dialled == rank]:
            connection.end(None)
        member.sender.close(PeerLost(rank, "its connection is gone"), keep_control=True)
        connections, member.links = member.links, {}
        self._leaving.update(connections.values())
        for connection in connections.values():
            connection.close_soon()
            self._loop.call_later(LINGER_S, partial(connection.end, None))
        self.entrance.mind()

    def expects(self, count: int) -> None:
        self.entrance.due = count
        self.entrance.mind()

    def receive(self, key: bytes, answer: Callable[[bytes], bytes]) -> None:
        self.entrance.visits, self.entrance.tls = (key, answer), None
        self.entrance.mind()

    def quiet_s(self, rank: int) -> float:
        connections = self._remotes[rank].links.values() if rank in self._remotes else ()
        return min((time.monotonic() - connection.read_s for connection in connections), default=math.inf)

    def traffic(self, rank: int) -> Traffic:
        member = self._remotes.get(rank)
        if member is None:
            return Traffic(0, 0)
        received_nbytes = sum(connection.read_nbytes for connection in member.links.values())
        return Traffic(received_nbytes, member.landings.nbytes + member.sender.taken_nbytes)

    def failed_at(self, rank: int) -> bool:
        return rank in self._remotes and self._remotes[rank].failed

    # --- sending ----------------------------------------------------------------------------------------------------

    @property
    def held_nbytes(self) -> int:
        queued = sum(member.sender.nbytes for member in self._remotes.values())
        return queued + sum(connection.unsent for connection in self._links())

    def _links(self) -> list[Link]:
        """Lists the connections of current and removed members."""
        return [
            *self._leaving,
            *(connection for member in self._remotes.values() for connection in member.links.values()),
        ]

    def send(self, rank: int, frames: Sequence[Frame], *, priority: int = 0, view: int = 0) -> Pending[None]:
        member = self._remotes.get(rank)
        if member is None or member.ended:
            return failed(PeerLost(rank, "its connection is gone"))
        sent = member.sender.put(frames, priority, view)
        if rank not in self._busy:  # messages that follow in this turn leave together
            self._busy.add(rank)
            for connection in tuple(member.links.values()):
                connection.flush()
        return sent

    def say(self, rank: int, frames: Sequence[Frame], *, last: bool = False) -> None:
        sent = self.send(rank, frames, priority=LAST if last else FIRST, view=CONTROL)
        if sent.error is not None:
            raise sent.error
        self._flush()

    def withdraw(self, view: int) -> None:
        for rank, member in self._remotes.items():
            member.sender.withdraw(view)
            self._busy.add(rank)

    def _flush(self) -> None:
        while self._busy:
            member = self._remotes.get(self._busy.pop())
            if member is not None:
                for connection in tuple(member.links.values()):
                    connection.flush()

    # --- receiving --------------------------------------------------------------------------------------------------

    def watch(self, fd: int, readable: Callable[[], None]) -> None:
        self._loop.watch(fd, readable=readable)

    def call_later(self, seconds: float, fn: Callable[[], object]) -> None:
        self._loop.call_later(seconds, fn)

    def poll(self, timeout_s: float | None) -> None:
        self._flush()
        self._loop.once(timeout_s)

    def arrived(self, link: Link, message: Message) -> None:
        assert link.rank is not None
        try:
            self.listener.arrived(link.rank, message)
        except WireError as error:
            self._refuse(error)

    def malformed(self, link: Link, nbytes: int, error: WireError) -> None:
        """Removes a member that has sent unreadable bytes."""
        assert link.rank is not None
        self._refuse(error)
        self.listener.malformed(link.rank, nbytes, str(error))
        self.dismiss(link.rank)

    def _refuse(self, error: WireError) -> None:
        self.refused += 1
        self._report(f"a message ({error})")

    def _report(self, what: str) -> None:
        count = self.refused + self.turned_away
        if count >= self._said_at:
            self._said_at = 2 * count
            logging.getLogger("farflung").warning(
                "rank %d at %s: refused %s that is not of this run; %d messages and %d connections so far",
                self.me.rank,
                self.me.where,
                what,
                self.refused,
                self.turned_away,
            )

    # --- connections --------------------------------------------------------------------------------------------------

    def promote(self, member: Remote, link: Link) -> None:
        """Adds an authenticated connection to its member."""
        self.entrance.early.discard(link)
        member.failed = False
        member.links[link.index] = link
        if link.index == 0 and member.wanted > 1:
            member.sender.links(member.wanted)
        receiver = Receiver(member.landings, first=link.index == 0, links=partial(self._widened, member))
        link.promote(member.peer.rank, member.sender, receiver, member.links)
        self.entrance.mind()

    def see_off(self, link: Link) -> None:
        """Keeps a visitor's connection open until its queued bytes have been sent."""
        self._leaving.add(link)
        self._loop.call_later(LINGER_S, partial(link.end, None))

    def turn_away(self) -> None:
        """Counts a connection that did not authenticate."""
        self.turned_away += 1
        self._report("a connection")

    # --- several connections ----------------------------------------------------------------------------------------

    def _widen(self, member: Remote, count: int) -> None:
        """Requests ``count`` connections to a peer."""
        member.wanted = count
        member.sender.links(count)
        self._busy.add(member.peer.rank)
        self.entrance.mind()

    def _widened(self, member: Remote, count: int) -> None:
        """Handles a peer's request for ``count`` connections: agrees, and makes those that this rank has to make."""
        if member.wanted < count <= MOST_CONNECTIONS:
            self._widen(member, count)
        if connects(self.me, member.peer):
            dialled = {early.index for early in self.entrance.early if early.dialled == member.peer.rank}
            for index in range(1, min(count, member.wanted)):
                if index not in member.links and index not in dialled:
                    self.entrance.dial(member, index)

    def busy(self, link: Link) -> None:
        """Adds connections to a peer whose connection has had more to send than it could, as long as that helps.

        If a connection reaches at least half of what its losses and its window allow, these limit it and not
        the network, so twice as many are tried. If all of them together did not become faster by a quarter,
        their number stays.
        """
        member = self._remotes.get(-1 if link.rank is None else link.rank)
        if member is None or self._connections is not None or link.index or member.settled:
            return
        took_s = link.busy_s - member.looked_s
        info = link.path() if took_s >= WIDEN_S else None
        if info is None or info.round_trip_s < SHORT_S:
            return
        sent = sum(sibling.busy_nbytes for sibling in member.links.values())
        rate_bps = 8 * (sent - member.sent) / took_s
        member.looked_s, member.sent = link.busy_s, sent
        if rate_bps < WORTH * member.rate_bps or 2 * member.wanted > MOST_UNASKED:
            member.settled = True
        elif rate_bps / len(member.links) >= _reach_bps(info) / 2:
            member.rate_bps = rate_bps
            self._widen(member, 2 * member.wanted)

    # --- the end ----------------------------------------------------------------------------------------------------

    def gone(self, link: Link, was: State, error: Exception | None) -> None:
        """Handles the end of a connection."""
        self._leaving.discard(link)
        member = self._remotes.get(-1 if link.rank is None else link.rank)
        if link in self.entrance.early:
            self.entrance.gone(link, member, was, error)
        elif link.rank is not None:
            link.abandon(PeerLost(link.rank, "its connection is gone"))
            if member is not None and member.links.get(link.index) is link:
                del member.links[link.index]
                self._ended(member)

    def _ended(self, member: Remote) -> None:
        """Handles the end of one of a member's connections: it is lost unless the others end soon by themselves."""
        for connection in tuple(member.links.values()):
            while connection.read():
                pass
        if not member.links:
            self._lose(member)
        elif not member.ended:
            self._loop.call_later(OTHERS_S, partial(self._lose, member))

    def _lose(self, member: Remote) -> None:
        if member.ended or self._closes:
            return
        member.ended = True
        rank = member.peer.rank
        connections, member.links = member.links, {}
        for connection in connections.values():
            connection.end(None)
        member.sender.close(PeerLost(rank, "its connection is gone"))
        if self._remotes.get(rank) is member:
            self.listener.closed(rank)

    def close(self, *, linger: bool) -> None:
        self._closes = True
        _open.discard(self)
        self.entrance.close()
        connections = self._links()
        if linger:
            for connection in connections:
                connection.close_soon()
            end_s, min_nbytes = time.monotonic() + LINGER_S, math.inf
            while (
                unacked := sum(item.unsettled_nbytes() for item in connections)
            ) and time.monotonic() < end_s:
                if unacked < min_nbytes:
                    end_s, min_nbytes = time.monotonic() + LINGER_S, unacked
                self._loop.once(0.01)
        for connection in connections:
            connection.end(None)
        self._loop.close()

    def abandon(self) -> None:
        """Closes the sockets that a child process has inherited, so that the parent's end closes its connections."""
        for connection in (*self.entrance.early, *self._links()):
            connection.sock.close()
        if self.entrance.door is not None:
            self.entrance.door.close()
        self._loop.close()


_open: weakref.WeakSet[TcpTransport] = weakref.WeakSet()
"""Open transports of this process."""


def _abandon_all() -> None:
    for transport in tuple(_open):
        transport.abandon()
    _open.clear()


os.register_at_fork(after_in_child=_abandon_all)


def _reach_bps(path: Path) -> float:
    """Computes the most that one connection can carry, by its losses and by the largest window."""
    control: Any = path.control if path.control in get_args(CongestionControl) else None
    by_loss = window_share_bps(control, path.loss, path.round_trip_s)
    return min(by_loss, LARGEST_WINDOW_BITS / path.round_trip_s)


def _door(interface: str, ports: Sequence[int], backlog: int) -> socket.socket:
    """Listens on the first free port."""
    family = socket.AF_INET6 if ":" in interface else socket.AF_INET
    for port in ports:
        try:
            server_socket = socket.create_server((interface, port), family=family, backlog=backlog)
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError(f"interface {interface}: cannot listen there ({error.strerror})") from None
        else:
            server_socket.setblocking(False)
            return server_socket
    span = f"port {ports[0]}" if len(ports) == 1 else f"ports {ports[0]} to {ports[-1]}"
    raise ConfigError(
        f"interface {interface}: {span} in use: give others with --port, one for each replica here"
    )


def _raise_limit(size: int, connections: int) -> None:
    """Raises the limit of open files to what a run of ``size`` replicas and unauthenticated connections take.

    Raises:
      ConfigError: the system allows fewer.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return
    limit = _ENOUGH_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH_DESCRIPTORS)
    limit, needed = max(soft, limit), connections * size + _RESERVE
    if limit < needed:
        raise ConfigError(
            f"{size} replicas take {needed} open files in each process, and {limit} are allowed: raise ulimit -n"
        )
    if soft < limit:
        with suppress(OSError, ValueError):  # macOS allows fewer than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
