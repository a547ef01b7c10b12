"""Hands parcels to a ROUTER socket, as many as each of its connections takes."""

from __future__ import annotations

from collections.abc import Sequence

import zmq

from farflung.comm.outbox import Outbox
from farflung.comm.wire import Frame
from farflung.tasks import Pending

__all__ = ["AT_ONCE", "SLOW_AT_ONCE", "Sending"]

SLOW_AT_ONCE = 2
"""Parcels that the socket holds for a connection; all others wait here, where they can be overtaken and taken back."""
AT_ONCE = 16
"""The same within a machine, where they are gone at once, and ZeroMQ wakes a thread each time that half of them are."""
ZERO_COPY_NBYTES = 1 << 19
"""Frames from this size on are sent without a copy; below it a copy takes less than waking the thread of pyzmq's that
gives each frame's memory back."""
_MORE, _MORE_AT_ONCE = int(zmq.SNDMORE), int(zmq.SNDMORE | zmq.NOBLOCK)
"""Numbers, since flags of an enumeration take longer than what they are for."""


class Sending:
    """The outboxes of a socket's connections, by routing id.

    Args:
      socket: the ROUTER; it belongs to the same thread.
      piece: see :class:`farflung.comm.outbox.Outbox`.
      at_once: how many parcels the socket holds for a connection.
    """

    def __init__(self, socket: zmq.Socket[bytes], piece: int, at_once: int) -> None:
        self._socket, self._piece = socket, piece
        self._outboxes: dict[bytes, Outbox] = {}
        self._full: dict[bytes, bool] = {}
        """Connections whose outbox is not empty, in their order."""
        self._spoken: set[bytes] = set()
        """Those that have sent since the last flush."""
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        socket.setsockopt(zmq.SNDHWM, at_once)

    @property
    def held_nbytes(self) -> int:
        """Bytes that the socket has not taken yet."""
        return sum(self._outboxes[to].nbytes for to in self._full)

    @property
    def waits(self) -> bool:
        """Whether there is anything that the socket has not taken yet."""
        return bool(self._full)

    def put(self, to: bytes, frames: Sequence[Frame], priority: int, view: int) -> Pending[None]:
        """Sends a message, or queues it behind others; done when the socket has taken all of it, a small one at once.

        What follows a message over the same connection waits for :meth:`flush`, so that small ones leave together.
        """
        outbox = self._outboxes.get(to)
        if outbox is None:
            outbox = self._outboxes[to] = Outbox(self._piece)
        left = outbox.put(frames, priority, view)
        waits, self._full[to] = to in self._full, True
        if not waits and to not in self._spoken:
            self._spoken.add(to)
            self._drain(to)
        return left

    def flush(self) -> list[bytes]:
        """Sends what there is room for now; returns the ids under which nobody is connected."""
        self._spoken.clear()
        return [to for to in tuple(self._full) if to in self._full and not self._drain(to)]

    def withdraw(self, view: int) -> None:
        """Takes back what a view has queued; see :meth:`farflung.comm.outbox.Outbox.withdraw`."""
        for outbox in self._outboxes.values():
            outbox.withdraw(view)

    def divert(self, to: bytes, other: bytes) -> None:
        """A connection is gone: what waits for it takes another."""
        outbox = self._outboxes.pop(to, None)
        if self._full.pop(to, False) and outbox is not None:
            self._full[other] = True
            self._outboxes.setdefault(other, Outbox(self._piece)).adopt(outbox)

    def close(self, to: bytes, error: BaseException) -> None:
        """A connection is gone: what waits for it ends with an error."""
        self._full.pop(to, None)
        outbox = self._outboxes.pop(to, None)
        if outbox is not None:
            outbox.close(error)

    def _drain(self, to: bytes) -> bool:
        """Sends what a connection takes; false: there is none.

        Whoever is told that a message has left may close the connection, or put more.
        """
        outbox = self._outboxes[to]
        while outbox:
            takes = self._takes(to)
            if not takes:
                return takes is not None
            parcel, through = outbox.take()
            self._send(parcel)
            for left in through:
                left.set(None)
        self._full.pop(to, None)
        return True

    def _takes(self, to: bytes) -> bool | None:
        """Whether a connection has room for a parcel, whose frames have to follow then; ``None``: there is none."""
        for last in (False, True):
            try:
                self._socket.send(to, _MORE_AT_ONCE)
            except zmq.Again:
                if not last:
                    self._socket.getsockopt(zmq.EVENTS)  # has it take in that there is room
            except zmq.ZMQError as error:
                if error.errno != zmq.EHOSTUNREACH:
                    raise
                return None
            else:
                return True
        return False

    def _send(self, frames: Sequence[Frame]) -> None:
        for frame in frames[:-1]:
            self._socket.send(frame, _MORE, copy=len(frame) < ZERO_COPY_NBYTES)
        self._socket.send(frames[-1], 0, copy=len(frames[-1]) < ZERO_COPY_NBYTES)
