"""Frames between real processes over ZeroMQ.

One ROUTER socket per process both listens and connects: of two the higher rank connects, so each pair shares one TCP
connection and works where one side alone can be reached. A routing id is a random token that only the run's processes
learn, through the store; whatever comes from another id is refused and counted.

Whoever connects proves first who it is, and a rank is bound to that: see :mod:`farflung.comm.gate`. Off loopback
everything is encrypted too, and both ends prove themselves. Once all have come in the door is shut: see
:mod:`farflung.comm.door`.

There are no ZeroMQ heartbeats: on a missed one libzmq would close the connection and drop what it held, while TCP
carries everything across a cut by itself. A healthy but slow or silent peer is therefore only ever put out by a
deadline, whereas a connection closed from the peer's end is told at once.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence

import zmq

from farflung.comm.connections import Connections
from farflung.comm.door import Door
from farflung.comm.gate import Gate
from farflung.comm.interface import LOOPBACK
from farflung.comm.keys import Keys
from farflung.comm.peer import Peer
from farflung.comm.ports import advertised
from farflung.comm.transport import Listener
from farflung.comm.wire import PIECE, WHOLE, Frame, WireError
from farflung.errors import ConfigError, PeerLost
from farflung.tasks import Pending, done, failed

__all__ = ["ZmqTransport"]

ZERO_COPY_NBYTES = 1 << 19
"""Frames from this size on are sent without a copy; below it a copy takes less than waking the thread of pyzmq's that
gives each frame's memory back."""
HEAD_NBYTES = 1 << 20
"""The most that a header frame may take, and what a frame takes beside its piece of a tensor."""
KNOCK_S = 5.0
"""After how long a replica whose connection is not taken up knocks anew."""
LINGER_S = 5
_SENT = done(None)


class ZmqTransport:
    """The connections of one process; see :class:`farflung.comm.transport.Transport`.

    Args:
      rank: this process.
      size: number of processes of the run.
      interface: the address to bind, loopback by default.
      ports: at the first of these that is free; 0: any.
      advertise: the host, or host and port, by which the others reach this one, where that is not the address that is
        bound: behind port forwarding, in a container.
      keys: what to prove this process with; everything is encrypted then. Off loopback there have to be some.

    Raises:
      ConfigError: the address is none of this machine's, or not loopback and there are no keys.
    """

    holds = False

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        interface: str = LOOPBACK,
        ports: Sequence[int] = (0,),
        advertise: str | None = None,
        keys: Keys | None = None,
    ) -> None:
        self.keys = keys
        self.refused = self.turned_away = 0
        self.piece = PIECE if keys else WHOLE
        self._listener: Listener | None = None
        self._peers: dict[int, Peer] = {}
        self._rank_of: dict[bytes, int] = {}
        self._denied: set[int] = set()
        self._due = size - 1 - rank
        self._watched: dict[int, Callable[[], None]] = {}
        token = secrets.token_bytes(16)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTING_ID, token),
            (zmq.ROUTER_MANDATORY, 1),
            (zmq.SNDHWM, 0),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, self.piece + HEAD_NBYTES),
            (zmq.CONNECT_TIMEOUT, int(KNOCK_S * 1000)),
            (zmq.LINGER, LINGER_S * 1000),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 30),
        ):
            self._socket.setsockopt(option, value)
        self._connections = Connections(self._socket)
        self._monitor = self._connections.monitor
        self._gate = Gate(self._context, token, keys)
        self._door: Door | None = None
        try:
            self._door = Door(self._socket, interface, self._gate, size, ports)
            address = self._door.address if advertise is None else advertised(advertise, self._door.port)
        except ConfigError:
            self.close(linger=False)
            raise
        self.me = Peer(rank, address, token, keys.public if keys else None)
        self._poller = zmq.Poller()
        for readable in (self._socket, self._monitor, self._gate.questions):
            self._poller.register(readable, zmq.POLLIN)

    def open(self, others: Sequence[Peer], listener: Listener) -> None:
        """See :class:`farflung.comm.transport.Transport`."""
        assert self._door is not None
        self._listener = listener
        for peer in others:
            self._peers[peer.rank] = peer
            self._rank_of[peer.token] = peer.rank
        self._gate.admit(peer for peer in others if peer.rank > self.me.rank)
        self._door.open()
        for peer in others:
            if peer.rank < self.me.rank:
                self._gate.approach(self._socket, self.me.rank, peer)
                self._socket.setsockopt(zmq.IPV6, "[" in peer.address)
                self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, peer.token)
                self._socket.connect(peer.address)

    def expects(self, count: int) -> None:
        """See :class:`farflung.comm.transport.Transport`."""
        self._due = count
        self._mind_the_door()

    def failed_at(self, rank: int) -> bool:
        """See :class:`farflung.comm.transport.Transport`."""
        return rank in self._peers and self._peers[rank].address in self._connections.failed

    # --- sending ----------------------------------------------------------------------------------------------------

    def send(self, rank: int, frames: Sequence[Frame], nbytes: int) -> Pending[None]:
        """Hands the frames to ZeroMQ's own thread."""
        del nbytes
        try:
            self.say(rank, frames)
        except PeerLost as error:
            return failed(error)
        return _SENT

    def say(self, rank: int, frames: Sequence[Frame]) -> None:
        """Hands the frames to ZeroMQ's own thread.

        Raises:
          PeerLost: the connection is gone.
        """
        try:
            self._socket.send(self._peers[rank].token, zmq.SNDMORE)
            for frame in frames[:-1]:
                self._socket.send(frame, zmq.SNDMORE, copy=len(frame) < ZERO_COPY_NBYTES)
            self._socket.send(frames[-1], 0, copy=len(frames[-1]) < ZERO_COPY_NBYTES)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            raise PeerLost(rank, "its connection is gone") from None

    # --- hearing ----------------------------------------------------------------------------------------------------

    def watch(self, fd: int, readable: Callable[[], None]) -> None:
        """See :class:`farflung.comm.transport.Transport`."""
        self._poller.register(fd, zmq.POLLIN)
        self._watched[fd] = readable

    def poll(self, timeout_s: float | None) -> None:
        """See :class:`farflung.comm.transport.Transport`."""
        events = dict(self._poller.poll(None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999))))
        if self._gate.questions in events:
            self._gate.answer()
        if self._socket in events:
            self._receive_all()
        if self._monitor in events or self._connections.any_closed:
            self._look_for_losses()
        for fd in self._watched.keys() & events.keys():
            self._watched[fd]()

    def close(self, *, linger: bool) -> None:
        """See :class:`farflung.comm.transport.Transport`."""
        if self._door is not None:
            self._door.close()
        self._connections.close()
        self._gate.close()
        self._socket.close(linger=LINGER_S * 1000 if linger else 0)
        self._context.term()

    def _receive_all(self) -> None:
        receive, state = self._socket.recv, self._socket.getsockopt
        while int(state(zmq.EVENTS)) & zmq.POLLIN:
            sender = receive()
            frames = [receive(copy=False)]
            while frames[-1].more:
                frames.append(receive(copy=False))
            try:
                self._take(sender, frames)
            except WireError as error:
                self.refused += 1
                self._report(f"a message ({error})")

    def _take(self, sender: bytes, frames: Sequence[zmq.Frame]) -> None:
        rank = self._rank_of.get(sender)
        if rank is None:
            raise WireError("a message from nobody of this run")
        assert self._listener is not None
        self._prove(rank, frames[0])
        self._listener.arrived(rank, [frame.buffer for frame in frames])

    def _prove(self, rank: int, frame: zmq.Frame) -> None:
        """Holds the first message over a connection against what that has proved; all others come over the same one."""
        descriptor = frame.get(zmq.SRCFD)
        if self._connections.rank_of(descriptor) == rank:
            return
        due = self._gate.name_of(self._peers[rank]) if rank > self.me.rank else None
        if self._gate.named(frame) != due:
            raise WireError("a message under another's name")
        self._connections.bind(descriptor, rank)

    def _look_for_losses(self) -> None:
        self._connections.read()
        # What a peer sent before it went is in the socket by now, its farewell too.
        self._receive_all()
        ranks, strangers = self._connections.take_closed()
        if strangers:
            self.turned_away += strangers
            self._report("a connection")
        self._mind_the_door()
        for rank in ranks:
            assert self._listener is not None
            self._listener.closed(rank)
        for rank, peer in self._peers.items():
            if peer.address in self._connections.denied and rank not in self._denied:
                assert self._listener is not None
                self._denied.add(rank)
                self._listener.denied(rank)

    def _mind_the_door(self) -> None:
        assert self._door is not None
        self._door.mind(self._due, self._connections.waiting)

    def _report(self, what: str) -> None:
        if self.refused + self.turned_away == 1:
            logging.getLogger("farflung").warning(
                "rank %d at %s: refused %s that is not of this run; all of them are counted",
                self.me.rank,
                self.me.address,
                what,
            )
