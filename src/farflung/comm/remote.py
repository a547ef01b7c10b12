"""Peer of a transport: its messages under way, its connections, and how many of them it has."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

from torch import Tensor

from farflung.comm.connection import LINGER_S, Connection
from farflung.comm.peer import Peer, should_connect
from farflung.comm.pieces import TcpInfo
from farflung.comm.pool import BufferPool
from farflung.comm.records import Receiver, RecvBuffers, Sender
from farflung.comm.transport import ConnectionTraffic
from farflung.comm.wire import Head, WireError
from farflung.errors import PeerLost
from farflung.network.tcp import LARGEST_WINDOW_BITS, CongestionControl, compute_window_bps
from farflung.options import MAX_CONNECTIONS

if TYPE_CHECKING:
    from farflung.comm.tcp import TcpTransport

__all__ = ["Remote"]

SIBLING_CLOSE_S = 1.0
"""Seconds that the other connections to a peer may take to end, once one of them has."""
MAX_AUTO_CONNECTIONS = 16
"""Most connections to a peer if no number was given."""
MEASURE_BUSY_S = 2.0
"""Busy seconds after which it is decided if more connections would help."""
MIN_SPEEDUP = 1.25
"""Speedup that twice as many connections must reach."""
SHORT_ROUND_TRIP_S = 0.005
"""Round trip below which one connection is enough, in seconds."""


class Remote:
    """Peer that is accepted or connected to.

    Args:
      transport: Transport of this process.
      peer: Address and credentials of the peer.
      pool: Memory for received tensors.
      connections: Number of connections to it; None adds them while they help.
      is_reconnect: True if it was connected before.
    """

    def __init__(
        self,
        transport: TcpTransport,
        peer: Peer,
        pool: BufferPool,
        *,
        connections: int | None,
        is_reconnect: bool,
    ) -> None:
        self.transport, self.peer, self._pool = transport, peer, pool
        self.is_reconnect = is_reconnect
        self.num_retries = 0
        """Number of quick attempts to reconnect."""
        self.has_failed_auth = False
        """True if a process at its address failed to authenticate as this peer."""
        self.has_ended = False
        """True once it was removed, or its connections have ended."""
        self.sender = Sender()
        self.recv_buffers = RecvBuffers(self._allocate_tensor, lambda: transport.max_nbytes)
        """Partly received messages."""
        self.connections: dict[int, Connection] = {}
        """Authenticated connections, by number."""
        self.num_wanted = connections or 1
        """Number of requested connections."""
        self._has_enough_connections = connections is not None
        """True if more connections were not asked for, or have not helped."""
        self._measured_busy_s, self._measured_nbytes, self._rate_bps = 0.0, 0, 0.0
        """Busy seconds of the first connection, bytes that all had sent, and their rate, at the last measurement."""

    def _allocate_tensor(self, head: Head, number: int) -> Tensor:
        """Allocates a large tensor of a message, in the posted receive buffer if there is one."""
        nbytes, listener = head.layout.large_nbytes[number], self.transport.listener
        buffer = None if number else listener.get_recv_buffer(self.peer.rank, head, nbytes)
        return self._pool.allocate_tensor(nbytes) if buffer is None else buffer

    def get_traffic(self) -> ConnectionTraffic:
        """Returns the traffic of its connections so far."""
        received_nbytes, idle_s = 0, math.inf
        for connection in self.connections.values():
            info = connection.pieces.read_tcp_info()
            received_nbytes += connection.read_nbytes if info is None else info.received_nbytes
            idle_s = idle_s if info is None else min(idle_s, info.idle_s)
        bulk_nbytes = self.recv_buffers.received_nbytes + self.sender.dequeued_nbytes
        return ConnectionTraffic(received_nbytes, bulk_nbytes, idle_s)

    def add_connection(self, connection: Connection) -> None:
        """Adds an authenticated connection."""
        self.has_failed_auth = False
        self.connections[connection.index] = connection
        if connection.index == 0 and self.num_wanted > 1:
            self.sender.queue_connection_count(self.num_wanted)
        receiver = Receiver(
            self.recv_buffers,
            is_first_connection=connection.index == 0,
            on_connection_count=self._handle_connection_count,
        )
        connection.promote(self, receiver)

    def handle_malformed(self, nbytes: int, error: WireError) -> None:
        """Handles unreadable bytes, after which the peer is removed."""
        self.transport.refusals.count_message(error)
        self.transport.listener.handle_malformed(self.peer.rank, nbytes, str(error))
        if not self.has_ended:
            self.transport.remove_peer(self.peer.rank)

    # --- several connections ----------------------------------------------------------------------------------------

    def _request_connections(self, count: int) -> None:
        """Requests ``count`` connections."""
        self.num_wanted = count
        self.sender.queue_connection_count(count)
        self.transport.busy_remotes.add(self)
        self.transport.handshaker.update_accepting()

    def _handle_connection_count(self, count: int) -> None:
        """Handles the peer's request for ``count`` connections: agrees, and makes those that this rank has to make."""
        handshaker = self.transport.handshaker
        if self.num_wanted < count <= MAX_CONNECTIONS:
            self._request_connections(count)
        if should_connect(self.transport.local_peer, self.peer):
            dialed = {
                early.index for early in handshaker.unauthenticated if early.dialed_rank == self.peer.rank
            }
            for index in range(1, min(count, self.num_wanted)):
                if index not in self.connections and index not in dialed:
                    handshaker.connect(self, index)

    def handle_busy(self, connection: Connection) -> None:
        """Adds connections if one has had more to send than it could, as long as that helps.

        If a connection reaches at least half of what its losses and its window allow, these limit it and not
        the network, so twice as many are tried. If all of them together did not become faster by a quarter,
        their number stays.
        """
        took_s = connection.pieces.busy_s - self._measured_busy_s
        if connection.index or self._has_enough_connections or took_s < MEASURE_BUSY_S:
            return
        info = connection.pieces.read_tcp_info()
        if info is None or info.round_trip_s < SHORT_ROUND_TRIP_S:
            return
        sent = sum(sibling.pieces.busy_nbytes for sibling in self.connections.values())
        rate_bps = 8 * (sent - self._measured_nbytes) / took_s
        self._measured_busy_s, self._measured_nbytes = connection.pieces.busy_s, sent
        if rate_bps < MIN_SPEEDUP * self._rate_bps or 2 * self.num_wanted > MAX_AUTO_CONNECTIONS:
            self._has_enough_connections = True
        elif rate_bps / len(self.connections) >= _compute_limit_bps(info) / 2:
            self._rate_bps = rate_bps
            self._request_connections(2 * self.num_wanted)

    # --- the end ----------------------------------------------------------------------------------------------------

    def handle_end(self, connection: Connection) -> None:
        """Handles the end of one of its connections: it is lost unless the others end soon by themselves."""
        if self.connections.get(connection.index) is not connection:
            return
        del self.connections[connection.index]
        for sibling in tuple(self.connections.values()):
            while sibling.read_available():
                pass
        if not self.connections:
            self._close()
        elif not self.has_ended:
            self.transport.loop.call_later(SIBLING_CLOSE_S, self._close)

    def _close(self) -> None:
        if not self.has_ended:
            for connection in self._take_connections():
                connection.end(None)
            self.sender.close(PeerLost(self.peer.rank, "its connection is gone"))
            self.transport.listener.handle_close(self.peer.rank)

    def remove(self) -> None:
        """Closes its connections once control messages are sent."""
        connections = self._take_connections()
        self.sender.close(PeerLost(self.peer.rank, "its connection is gone"), keep_control=True)
        for connection in connections:
            self.transport.loop.call_later(LINGER_S, partial(connection.end, None))
            connection.close_when_sent()

    def _take_connections(self) -> list[Connection]:
        """Ends the peer's part, and returns its connections."""
        self.has_ended = True
        connections, self.connections = [*self.connections.values()], {}
        return connections


def _compute_limit_bps(info: TcpInfo) -> float:
    """Computes the most that one connection can carry, by its losses and by the largest window."""
    control: Any = info.control if info.control in get_args(CongestionControl) else None
    by_loss = compute_window_bps(control, info.loss, info.round_trip_s)
    return min(by_loss, LARGEST_WINDOW_BITS / info.round_trip_s)
