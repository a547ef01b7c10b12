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

from farflung.comm.connection import Connection, ConnectionState, TcpInfo
from farflung.comm.endpoint import MAX_CONNECTIONS, UNREACHABLE, parse_advertised
from farflung.comm.framing import ENCRYPTED_PIECE_NBYTES
from farflung.comm.handshake import Handshaker, Remote
from farflung.comm.interface import LOOPBACK, format_tcp_address, is_loopback
from farflung.comm.keys import Keys
from farflung.comm.loop import EventLoop
from farflung.comm.peer import Peer, should_connect
from farflung.comm.pool import BufferPool
from farflung.comm.records import CONTROL_VIEW, FIRST_PRIORITY, LAST_PRIORITY, Receiver, RecvBuffers
from farflung.comm.transport import ConnectionTraffic, Listener
from farflung.comm.wire import Frame, Head, Message, WireError
from farflung.errors import ConfigError, PeerLost
from farflung.network.tcp import LARGEST_WINDOW_BITS, CongestionControl, compute_window_bps
from farflung.tasks import Pending, create_failed

__all__ = ["TcpTransport"]

LINGER_S = 5.0
"""Seconds without any byte sent after which a closing transport gives up; for removed peers, seconds in all."""
SIBLING_CLOSE_S = 1.0
"""Seconds that the other connections to a peer may take to end, once one of them has."""
MAX_AUTO_CONNECTIONS = 16
"""Most connections to a peer if no number was given."""
MEASURE_BUSY_S = 2.0
"""Busy seconds after which the transport decides if more connections would help."""
MIN_SPEEDUP = 1.25
"""Speedup that twice as many connections must reach."""
SHORT_ROUND_TRIP_S = 0.005
"""Round trip below which one connection is enough, in seconds."""
_BACKLOG = 128
_MAX_DESCRIPTORS = 1 << 16
_RESERVED_DESCRIPTORS = 256
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
        allow_late: bool = False,
        connections: int | None = None,
    ) -> None:
        is_local = is_loopback(interface)
        if not is_local and keys is None:
            raise ConfigError(
                f"interface {interface}: nothing leaves this machine without encryption, which takes keys"
            )
        _raise_limit(size, connections or 1)
        self.keys = keys
        self.num_refused = self.num_rejected = 0
        self.max_nbytes = 1 << 31
        self._next_report_count = 1
        """Number of refusals at which they are logged next."""
        self._connections = connections
        self._remotes: dict[int, Remote] = {}
        self._draining: set[Connection] = set()
        """Connections of removed peers that still have bytes to send."""
        self._busy_ranks: set[int] = set()
        """Ranks with possibly queued bytes since the last :meth:`poll`."""
        self._is_closing = False
        self.scratch = memoryview(bytearray(ENCRYPTED_PIECE_NBYTES))
        """Buffer for encrypted bytes on their way to TLS."""
        self._pool = BufferPool()
        address: str | None = None
        server_socket = (
            None if advertise == UNREACHABLE else _create_server_socket(interface, ports, size + _BACKLOG)
        )
        if server_socket is not None:
            port = server_socket.getsockname()[1]
            try:
                address = (
                    f"{format_tcp_address(interface)}:{port}"
                    if advertise is None
                    else parse_advertised(advertise, port)
                )
            except ConfigError:
                server_socket.close()
                raise
        machine = socket.gethostname() if is_local and advertise is None else None
        self.local_peer = Peer(rank, address, secrets.token_bytes(16), keys.public if keys else None, machine)
        self._loop = EventLoop()
        self.handshaker = Handshaker(self, self._loop, self._remotes, server_socket, size - 1, allow_late)
        _transports.add(self)

    # --- members ----------------------------------------------------------------------------------------------------

    def connect_peers(self, peers: Sequence[Peer], listener: Listener, *, is_reconnect: bool = False) -> None:
        self.listener = listener
        self.handshaker.start()
        for peer in peers:
            self.remove_peer(peer.rank)
            buffers = RecvBuffers(partial(self._allocate_tensor, peer.rank), lambda: self.max_nbytes)
            self._remotes[peer.rank] = Remote(
                peer, buffers, num_wanted=self._connections or 1, is_reconnect=is_reconnect
            )
        self.handshaker.server_context = None
        for peer in peers:
            if should_connect(self.local_peer, peer) or (is_reconnect and peer.address is not None):
                self.handshaker.connect(self._remotes[peer.rank], 0)
        self.handshaker.update_accepting()

    def _allocate_tensor(self, rank: int, head: Head, number: int) -> Tensor:
        """Allocates a large tensor of a message, in the posted receive buffer if there is one."""
        nbytes = head.large_nbytes[number]
        buffer = None if number else self.listener.get_recv_buffer(rank, head, nbytes)
        return self._pool.allocate_tensor(nbytes) if buffer is None else buffer

    def remove_peer(self, rank: int) -> None:
        member = self._remotes.pop(rank, None)
        if member is None:
            return
        self.handshaker.server_context = None
        for connection in [
            connection for connection in self.handshaker.connections if connection.dialed_rank == rank
        ]:
            connection.end(None)
        member.sender.close(PeerLost(rank, "its connection is gone"), keep_control=True)
        connections, member.connections = member.connections, {}
        self._draining.update(connections.values())
        for connection in connections.values():
            connection.close_when_sent()
            self._loop.call_later(LINGER_S, partial(connection.end, None))
        self.handshaker.update_accepting()

    def set_expected(self, count: int) -> None:
        self.handshaker.num_expected = count
        self.handshaker.update_accepting()

    def accept_visits(self, key: bytes, answer: Callable[[bytes], bytes]) -> None:
        self.handshaker.visit_handler, self.handshaker.server_context = (key, answer), None
        self.handshaker.update_accepting()

    def get_idle_s(self, rank: int) -> float:
        connections = self._remotes[rank].connections.values() if rank in self._remotes else ()
        return min(
            (time.monotonic() - connection.last_read_s for connection in connections), default=math.inf
        )

    def get_traffic(self, rank: int) -> ConnectionTraffic:
        member = self._remotes.get(rank)
        if member is None:
            return ConnectionTraffic(0, 0)
        received_nbytes = sum(connection.read_nbytes for connection in member.connections.values())
        return ConnectionTraffic(
            received_nbytes, member.recv_buffers.received_nbytes + member.sender.dequeued_nbytes
        )

    def has_failed_auth(self, rank: int) -> bool:
        return rank in self._remotes and self._remotes[rank].has_failed_auth

    # --- sending ----------------------------------------------------------------------------------------------------

    @property
    def queued_nbytes(self) -> int:
        queued = sum(member.sender.queued_nbytes for member in self._remotes.values())
        return queued + sum(connection.unsent_nbytes for connection in self._list_connections())

    def _list_connections(self) -> list[Connection]:
        """Lists the connections of current and removed members."""
        return [
            *self._draining,
            *(connection for member in self._remotes.values() for connection in member.connections.values()),
        ]

    def send(self, rank: int, frames: Sequence[Frame], *, priority: int = 0, view: int = 0) -> Pending[None]:
        member = self._remotes.get(rank)
        if member is None or member.has_ended:
            return create_failed(PeerLost(rank, "its connection is gone"))
        sent = member.sender.put(frames, priority, view)
        if rank not in self._busy_ranks:  # messages that follow in this turn leave together
            self._busy_ranks.add(rank)
            for connection in tuple(member.connections.values()):
                connection.flush()
        return sent

    def send_control(self, rank: int, frames: Sequence[Frame], *, last: bool = False) -> None:
        sent = self.send(rank, frames, priority=LAST_PRIORITY if last else FIRST_PRIORITY, view=CONTROL_VIEW)
        if sent.error is not None:
            raise sent.error
        self._flush()

    def withdraw(self, view: int) -> None:
        for rank, member in self._remotes.items():
            member.sender.withdraw(view)
            self._busy_ranks.add(rank)

    def _flush(self) -> None:
        while self._busy_ranks:
            member = self._remotes.get(self._busy_ranks.pop())
            if member is not None:
                for connection in tuple(member.connections.values()):
                    connection.flush()

    # --- receiving --------------------------------------------------------------------------------------------------

    def watch(self, fd: int, readable: Callable[[], None]) -> None:
        self._loop.watch(fd, readable=readable)

    def call_later(self, seconds: float, fn: Callable[[], object]) -> None:
        self._loop.call_later(seconds, fn)

    def poll(self, timeout_s: float | None) -> None:
        self._flush()
        self._loop.run_once(timeout_s)

    def handle_message(self, connection: Connection, message: Message) -> None:
        assert connection.rank is not None
        try:
            self.listener.handle_message(connection.rank, message)
        except WireError as error:
            self._refuse(error)

    def handle_malformed(self, connection: Connection, nbytes: int, error: WireError) -> None:
        """Removes a member that has sent unreadable bytes."""
        assert connection.rank is not None
        self._refuse(error)
        self.listener.handle_malformed(connection.rank, nbytes, str(error))
        self.remove_peer(connection.rank)

    def _refuse(self, error: WireError) -> None:
        self.num_refused += 1
        self._report(f"a message ({error})")

    def _report(self, subject: str) -> None:
        count = self.num_refused + self.num_rejected
        if count >= self._next_report_count:
            self._next_report_count = 2 * count
            logging.getLogger("farflung").warning(
                "rank %d at %s: refused %s that is not of this run; %d messages and %d connections so far",
                self.local_peer.rank,
                self.local_peer.address_text,
                subject,
                self.num_refused,
                self.num_rejected,
            )

    # --- connections --------------------------------------------------------------------------------------------------

    def promote(self, member: Remote, connection: Connection) -> None:
        """Adds an authenticated connection to its member."""
        self.handshaker.connections.discard(connection)
        member.has_failed_auth = False
        member.connections[connection.index] = connection
        if connection.index == 0 and member.num_wanted > 1:
            member.sender.queue_connection_count(member.num_wanted)
        receiver = Receiver(
            member.recv_buffers,
            is_first_connection=connection.index == 0,
            on_connection_count=partial(self._handle_connection_count, member),
        )
        connection.promote(member.peer.rank, member.sender, receiver, member.connections)
        self.handshaker.update_accepting()

    def drain_connection(self, connection: Connection) -> None:
        """Keeps a visitor's connection open until its queued bytes have been sent."""
        self._draining.add(connection)
        self._loop.call_later(LINGER_S, partial(connection.end, None))

    def count_rejected(self) -> None:
        """Counts a connection that did not authenticate."""
        self.num_rejected += 1
        self._report("a connection")

    # --- several connections ----------------------------------------------------------------------------------------

    def _request_connections(self, member: Remote, count: int) -> None:
        """Requests ``count`` connections to a peer."""
        member.num_wanted = count
        member.sender.queue_connection_count(count)
        self._busy_ranks.add(member.peer.rank)
        self.handshaker.update_accepting()

    def _handle_connection_count(self, member: Remote, count: int) -> None:
        """Handles a peer's request for ``count`` connections: agrees, and makes those that this rank has to make."""
        if member.num_wanted < count <= MAX_CONNECTIONS:
            self._request_connections(member, count)
        if should_connect(self.local_peer, member.peer):
            dialled = {
                early.index for early in self.handshaker.connections if early.dialed_rank == member.peer.rank
            }
            for index in range(1, min(count, member.num_wanted)):
                if index not in member.connections and index not in dialled:
                    self.handshaker.connect(member, index)

    def handle_busy(self, connection: Connection) -> None:
        """Adds connections to a peer whose connection has had more to send than it could, as long as that helps.

        If a connection reaches at least half of what its losses and its window allow, these limit it and not
        the network, so twice as many are tried. If all of them together did not become faster by a quarter,
        their number stays.
        """
        member = self._remotes.get(-1 if connection.rank is None else connection.rank)
        if (
            member is None
            or self._connections is not None
            or connection.index
            or member.has_enough_connections
        ):
            return
        took_s = connection.busy_s - member.measured_busy_s
        info = connection.read_tcp_info() if took_s >= MEASURE_BUSY_S else None
        if info is None or info.round_trip_s < SHORT_ROUND_TRIP_S:
            return
        sent = sum(sibling.busy_nbytes for sibling in member.connections.values())
        rate_bps = 8 * (sent - member.measured_nbytes) / took_s
        member.measured_busy_s, member.measured_nbytes = connection.busy_s, sent
        if rate_bps < MIN_SPEEDUP * member.rate_bps or 2 * member.num_wanted > MAX_AUTO_CONNECTIONS:
            member.has_enough_connections = True
        elif rate_bps / len(member.connections) >= _compute_limit_bps(info) / 2:
            member.rate_bps = rate_bps
            self._request_connections(member, 2 * member.num_wanted)

    # --- the end ----------------------------------------------------------------------------------------------------

    def handle_end(self, connection: Connection, old_state: ConnectionState, error: Exception | None) -> None:
        """Handles the end of a connection."""
        self._draining.discard(connection)
        member = self._remotes.get(-1 if connection.rank is None else connection.rank)
        if connection in self.handshaker.connections:
            self.handshaker.handle_end(connection, member, old_state, error)
        elif connection.rank is not None:
            connection.fail_unsent(PeerLost(connection.rank, "its connection is gone"))
            if member is not None and member.connections.get(connection.index) is connection:
                del member.connections[connection.index]
                self._handle_partial_loss(member)

    def _handle_partial_loss(self, member: Remote) -> None:
        """Handles the end of one of a member's connections: it is lost unless the others end soon by themselves."""
        for connection in tuple(member.connections.values()):
            while connection.read_available():
                pass
        if not member.connections:
            self._close_member(member)
        elif not member.has_ended:
            self._loop.call_later(SIBLING_CLOSE_S, partial(self._close_member, member))

    def _close_member(self, member: Remote) -> None:
        if member.has_ended or self._is_closing:
            return
        member.has_ended = True
        rank = member.peer.rank
        connections, member.connections = member.connections, {}
        for connection in connections.values():
            connection.end(None)
        member.sender.close(PeerLost(rank, "its connection is gone"))
        if self._remotes.get(rank) is member:
            self.listener.handle_close(rank)

    def close(self, *, linger: bool) -> None:
        self._is_closing = True
        _transports.discard(self)
        self.handshaker.close()
        connections = self._list_connections()
        if linger:
            for connection in connections:
                connection.close_when_sent()
            end_s, min_nbytes = time.monotonic() + LINGER_S, math.inf
            while (
                unacked := sum(item.count_undelivered_nbytes() for item in connections)
            ) and time.monotonic() < end_s:
                if unacked < min_nbytes:
                    end_s, min_nbytes = time.monotonic() + LINGER_S, unacked
                self._loop.run_once(0.01)
        for connection in connections:
            connection.end(None)
        self._loop.close()

    def close_inherited(self) -> None:
        """Closes the sockets that a child process has inherited, so that the parent's end closes its connections."""
        for connection in (*self.handshaker.connections, *self._list_connections()):
            connection.sock.close()
        if self.handshaker.server_socket is not None:
            self.handshaker.server_socket.close()
        self._loop.close()


_transports: weakref.WeakSet[TcpTransport] = weakref.WeakSet()
"""Open transports of this process."""


def _close_all_inherited() -> None:
    for transport in tuple(_transports):
        transport.close_inherited()
    _transports.clear()


os.register_at_fork(after_in_child=_close_all_inherited)


def _compute_limit_bps(info: TcpInfo) -> float:
    """Computes the most that one connection can carry, by its losses and by the largest window."""
    control: Any = info.control if info.control in get_args(CongestionControl) else None
    by_loss = compute_window_bps(control, info.loss, info.round_trip_s)
    return min(by_loss, LARGEST_WINDOW_BITS / info.round_trip_s)


def _create_server_socket(interface: str, ports: Sequence[int], backlog: int) -> socket.socket:
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
    limit = _MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MAX_DESCRIPTORS)
    limit, needed = max(soft, limit), connections * size + _RESERVED_DESCRIPTORS
    if limit < needed:
        raise ConfigError(
            f"{size} replicas take {needed} open files in each process, and {limit} are allowed: raise ulimit -n"
        )
    if soft < limit:
        with suppress(OSError, ValueError):  # macOS allows fewer than it reports
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
