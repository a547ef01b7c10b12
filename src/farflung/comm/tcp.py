"""TCP transport between real processes, encrypted with TLS 1.3 between machines.

One rank of each pair connects (:func:`farflung.comm.peer.should_connect`), so only the other must be reachable, at
one port. Authentication of a connection is in :mod:`farflung.comm.handshake`.

There are no heartbeats: TCP itself survives a network cut. Only a deadline gives up a slow or silent peer,
whereas a connection that the peer closes is reported at once.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import secrets
import socket
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress

from farflung.comm.connection import LINGER_S, Connection, ConnectionState
from farflung.comm.endpoint import UNREACHABLE, parse_advertised
from farflung.comm.handshake import Handshaker
from farflung.comm.interface import LOOPBACK, format_tcp_address, is_loopback
from farflung.comm.keys import Keys
from farflung.comm.loop import EventLoop
from farflung.comm.peer import Peer, should_connect
from farflung.comm.pool import BufferPool
from farflung.comm.remote import Remote
from farflung.comm.transport import ConnectionTraffic, Listener, Refusals
from farflung.comm.wire import Frame
from farflung.errors import ConfigError, PeerLost
from farflung.tasks import Pending, create_failed

__all__ = ["TcpTransport"]

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
      connections: Number of connections to each peer for bulk; None adds them while they help, see
        :meth:`farflung.comm.remote.Remote.handle_busy`.

    Raises:
      ConfigError: the address does not belong to this machine, or is not loopback and there are no keys; or
        this process may not open enough files.
    """

    listener: Listener
    """Receiver of events of members, set before :meth:`connect_peers`."""

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
        self.max_nbytes = 1 << 31
        self._num_connections = connections
        self._remotes: dict[int, Remote] = {}
        self.busy_remotes: set[Remote] = set()
        """Peers with possibly queued bytes since the last :meth:`poll`."""
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
        self.refusals = Refusals(self.local_peer)
        self.loop = EventLoop()
        self.handshaker = Handshaker(self, self.loop, self._remotes, server_socket, size - 1, allow_late)
        _transports.add(self)

    # --- members ----------------------------------------------------------------------------------------------------

    def connect_peers(self, peers: Sequence[Peer], *, is_reconnect: bool = False) -> None:
        self.handshaker.start()
        for peer in peers:
            self.remove_peer(peer.rank)
            self._remotes[peer.rank] = Remote(
                self, peer, self._pool, connections=self._num_connections, is_reconnect=is_reconnect
            )
        self.handshaker.server_context = None
        for peer in peers:
            if should_connect(self.local_peer, peer) or (is_reconnect and peer.address is not None):
                self.handshaker.connect(self._remotes[peer.rank], 0)
        self.handshaker.update_accepting()

    def remove_peer(self, rank: int) -> None:
        remote = self._remotes.pop(rank, None)
        if remote is None:
            return
        self.handshaker.server_context = None
        for connection in self.handshaker.unauthenticated:
            if connection.dialed_rank == rank:
                connection.end(None)
        remote.remove()
        self.handshaker.update_accepting()

    def set_expected(self, count: int) -> None:
        self.handshaker.num_expected = count
        self.handshaker.update_accepting()

    def accept_visits(self, key: bytes, answer: Callable[[bytes], bytes]) -> None:
        self.handshaker.visit_handler, self.handshaker.server_context = (key, answer), None
        self.handshaker.update_accepting()

    def get_traffic(self, rank: int) -> ConnectionTraffic:
        return self._remotes[rank].get_traffic() if rank in self._remotes else ConnectionTraffic(0, 0)

    def has_failed_auth(self, rank: int) -> bool:
        return rank in self._remotes and self._remotes[rank].has_failed_auth

    # --- messages ---------------------------------------------------------------------------------------------------

    def send(self, rank: int, frames: Sequence[Frame], *, priority: int = 0, view: int = 0) -> Pending[None]:
        remote = self._remotes.get(rank)
        if remote is None or remote.has_ended:
            return create_failed(PeerLost(rank, "its connection is gone"))
        sent = remote.sender.put(frames, priority, view)
        if remote not in self.busy_remotes:  # messages that follow in this turn leave together
            self.busy_remotes.add(remote)
            for connection in tuple(remote.connections.values()):
                connection.flush()
        return sent

    def withdraw(self, view: int) -> None:
        for remote in self._remotes.values():
            remote.sender.withdraw(view)
            self.busy_remotes.add(remote)

    def poll(self, timeout_s: float | None) -> None:
        while self.busy_remotes:
            for connection in tuple(self.busy_remotes.pop().connections.values()):
                connection.flush()
        self.loop.run_once(timeout_s)

    # --- the end ----------------------------------------------------------------------------------------------------

    def _list_authenticated(self) -> list[Connection]:
        """Lists the connections of present and removed peers."""
        return [
            connection
            for connection in self.handshaker.connections
            if connection.state > ConnectionState.UNAUTHENTICATED
        ]

    @property
    def queued_nbytes(self) -> int:
        queued = sum(remote.sender.queued_nbytes for remote in self._remotes.values())
        return queued + sum(connection.unsent_nbytes for connection in self._list_authenticated())

    def close(self) -> None:
        _transports.discard(self)
        self.handshaker.close()
        for remote in self._remotes.values():
            remote.has_ended = True
        connections = self._list_authenticated()
        # A peer that has left may still be reading what this end has sent, and closing would discard the rest of it.
        if any(connection.state is ConnectionState.AUTHENTICATED for connection in connections):
            for connection in connections:
                connection.close_when_sent()
            end_s, min_nbytes = time.monotonic() + LINGER_S, math.inf
            while (
                unacked := sum(item.count_undelivered_nbytes() for item in connections)
            ) and time.monotonic() < end_s:
                if unacked < min_nbytes:
                    end_s, min_nbytes = time.monotonic() + LINGER_S, unacked
                self.loop.run_once(0.01)
        for connection in connections:
            connection.end(None)
        self.loop.close()

    def close_inherited(self) -> None:
        """Closes the sockets that a child process has inherited, so that the parent's end closes its connections."""
        for connection in self.handshaker.connections:
            connection.sock.close()
        if self.handshaker.server_socket is not None:
            self.handshaker.server_socket.close()
        self.loop.close()


_transports: weakref.WeakSet[TcpTransport] = weakref.WeakSet()
"""Open transports of this process."""


def _close_all_inherited() -> None:
    for transport in tuple(_transports):
        transport.close_inherited()
    _transports.clear()


os.register_at_fork(after_in_child=_close_all_inherited)


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
