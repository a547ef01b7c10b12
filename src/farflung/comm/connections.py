"""Which connection belongs to which peer, and which have closed: what a socket's monitor tells."""

from __future__ import annotations

from dataclasses import dataclass

import zmq
from zmq.utils.monitor import parse_monitor_message

__all__ = ["Connections"]

_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL,
    zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL,
    zmq.EVENT_HANDSHAKE_FAILED_AUTH,
)


@dataclass(eq=False, slots=True)
class _Connection:
    accepted: bool
    owner: bytes | None = None
    closed: bool = False


class Connections:
    """Follows the connections of one socket.

    A connection is known by its descriptor, which the kernel gives to the next one as soon as it is free, and events
    come another way than messages do. What could go wrong:

    1. A stranger's connection, descriptor 20, fails its handshake and closes.
    2. Rank 3 connects and gets descriptor 20. Its greeting is read.
    3. The event of the first closing is read, and rank 3 is taken for lost.

    So all events there are get read before a greeting binds a descriptor to a peer. ZeroMQ tells of a closing before
    it frees the descriptor, so by then that of any earlier connection is among them.

    Args:
      socket: whose connections; the monitor belongs to the same thread.
    """

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self.failed: set[str] = set()
        """The addresses with which a handshake failed: one that we connected to, or our own."""
        self.denied: set[str] = set()
        """Those of them where somebody does not accept our key."""
        events = zmq.EVENT_ACCEPTED | zmq.EVENT_CONNECTED | zmq.EVENT_DISCONNECTED
        for event in _FAILED:
            events |= event
        self._socket = socket
        self.monitor: zmq.Socket[bytes] = socket.get_monitor_socket(events)
        self._latest: dict[int, _Connection] = {}
        self._closed: list[_Connection] = []

    def bind(self, descriptor: int, owner: bytes) -> None:
        """A message of this routing id has come over a connection, and proved to be of its owner."""
        self.read()
        connection = self._latest.setdefault(descriptor, _Connection(accepted=True, closed=True))
        connection.owner = owner
        if connection.closed and connection not in self._closed:
            self._closed.append(connection)

    def owner_of(self, descriptor: int) -> bytes | None:
        """Whose connection this is; it stays theirs until another has its descriptor."""
        connection = self._latest.get(descriptor)
        return None if connection is None else connection.owner

    def read(self) -> None:
        """Takes in all events there are."""
        while True:
            try:
                event = parse_monitor_message(self.monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            kind, value = event["event"], event["value"]
            if kind in _FAILED:
                address = event["endpoint"].decode()
                self.failed.add(address)
                if kind == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                    self.denied.add(address)
            elif kind != zmq.EVENT_DISCONNECTED:
                self._latest[value] = _Connection(accepted=kind == zmq.EVENT_ACCEPTED)
            elif value in self._latest:
                connection = self._latest[value]
                connection.closed = True
                self._closed.append(connection)

    @property
    def waiting(self) -> int:
        """How many have come here, are open, and have not greeted."""
        return sum(
            connection.accepted and connection.owner is None and not connection.closed
            for connection in self._latest.values()
        )

    @property
    def any_closed(self) -> bool:
        """Whether :meth:`take_closed` has something to tell."""
        return bool(self._closed)

    def take_closed(self) -> tuple[list[bytes], int]:
        """The routing ids whose connections have closed, and how many closed that came here and never greeted.

        Read the socket first: a greeting may have come before its connection closed.
        """
        closed, self._closed = self._closed, []
        owners = [connection.owner for connection in closed if connection.owner is not None]
        return owners, sum(connection.owner is None and connection.accepted for connection in closed)

    def close(self) -> None:
        """Ends the monitor; the socket stays."""
        self._socket.disable_monitor()
        self.monitor.close(linger=0)
