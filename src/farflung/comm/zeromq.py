"""Frames between real processes over ZeroMQ.

One ROUTER socket per process both listens and connects. Of two one connects (:func:`farflung.comm.peer.connects`), so
it is enough that the other can be reached, at one port. It connects twice: messages that are urgent have a connection
of their own, which waits behind no bulk; a connection that is lost loses the peer, one for urgent messages only the
haste. A routing id is a random token that only the run's processes learn, through the store; whatever comes from
another id is refused and counted.

Little is left to ZeroMQ's own queues, where nothing can be overtaken or taken back: see :mod:`farflung.comm.sending`.
Off loopback the kernel is told to take no more than a piece that it cannot send yet, for the same reason.

Whoever connects proves first who it is, and a rank is bound to that: see :mod:`farflung.comm.gate`. Off loopback
everything is encrypted too, and both ends prove themselves. Once all have come in the door is shut: see
:mod:`farflung.comm.door`.

There are no ZeroMQ heartbeats: on a missed one libzmq would close the connection and drop what it held, while TCP
carries everything across a cut by itself. A healthy but slow or silent peer is therefore only ever put out by a
deadline, whereas a connection closed from the peer's end is told at once.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import zmq

from farflung.comm.connections import Connections
from farflung.comm.door import Door, raise_limit
from farflung.comm.endpoint import NO_WAY_IN, advertised
from farflung.comm.gate import Gate
from farflung.comm.inbox import Inbox
from farflung.comm.interface import LOOPBACK, is_loopback
from farflung.comm.keys import Keys
from farflung.comm.outbox import Withdrawn
from farflung.comm.peer import Peer, connects
from farflung.comm.pool import Pool
from farflung.comm.sending import AT_ONCE, SLOW_AT_ONCE, Sending
from farflung.comm.transport import FIRST, LAST, Listener
from farflung.comm.wire import PIECE, WHOLE, Frame, Kind, Unauthorized, WireError, encode
from farflung.errors import ConfigError, PeerLost
from farflung.tasks import Pending, failed
from farflung.types import Payload, Tag

__all__ = ["ZmqTransport"]

HEAD_NBYTES = 1 << 20
"""The most that a header frame may take, and what a frame takes beside its piece of a tensor."""
KNOCK_S = 5.0
"""After how long a replica whose connection is not taken up knocks anew."""
LINGER_S = 5
BURST = 32
"""Parcels that are read in a row; then it is seen whether there is room to send."""
LOOK_AGAIN_S = 0.01
"""How long to sleep at most while messages wait for room: ZeroMQ may take in that there is some while it sends
another."""
_URGENT = b"!"
"""Behind a token: the routing id of the connection for urgent messages."""
_TCP_NOTSENT_LOWAT = 25
_EVENTS, _POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)
_OPEN = encode(Kind.OPEN, 0, Tag(0), Payload(()))


class ZmqTransport:
    """The connections of one process; see :class:`farflung.comm.transport.Transport`.

    Args:
      rank: this process.
      size: number of processes of the run.
      interface: the address to bind, loopback by default.
      ports: at the first of these that is free; 0: any.
      advertise: the host, or host and port, by which the others reach this one, where that is not the address that is
        bound: behind port forwarding, in a container. ``"none"``: nobody can connect to it, and it does not listen.
      keys: what to prove this process with; everything is encrypted then. Off loopback there have to be some.
      later: whether others may come later than the first meeting.

    Raises:
      ConfigError: the address is none of this machine's, or not loopback and there are no keys; or this process may
        not open enough files.
    """

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
    ) -> None:
        self._within_a_machine = is_loopback(interface)
        raise_limit(size)
        self.keys = keys
        self.refused = self.turned_away = 0
        self._said_at = 1
        """How many refusals there are when it is logged next how many."""
        self.piece = PIECE if keys else WHOLE
        self.max_nbytes = 1 << 31
        self._listener: Listener | None = None
        self._peers: dict[int, Peer] = {}
        self._inboxes: dict[bytes, tuple[int, Inbox]] = {}
        """By routing id: whose it is, and what has come in part."""
        self._pool = Pool()
        self._unreachable: set[bytes] = set()
        """Connections that turned out to be gone when something was to be sent."""
        self._told: set[bytes] = set()
        """Those of which it is told that they are gone."""
        self._denied: set[int] = set()
        self._due = size - 1
        self._urgent: set[int] = set()
        """Ranks with a connection for urgent messages."""
        self._urgent_due: set[int] = set()
        """Those that are to open one."""
        self._watched: dict[int, Callable[[], None]] = {}
        token = secrets.token_bytes(16)
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        for option, value in (
            (zmq.ROUTING_ID, token),
            (zmq.RCVHWM, 0),
            (zmq.MAXMSGSIZE, self.piece + HEAD_NBYTES),
            (zmq.CONNECT_TIMEOUT, int(KNOCK_S * 1000)),
            (zmq.LINGER, LINGER_S * 1000),
            (zmq.TCP_KEEPALIVE, 1),
            (zmq.TCP_KEEPALIVE_IDLE, 30),
        ):
            self._socket.setsockopt(option, value)
        self._sending = Sending(self._socket, self.piece, AT_ONCE if self._within_a_machine else SLOW_AT_ONCE)
        self._connections = Connections(self._socket)
        self._monitor = self._connections.monitor
        self._gate = Gate(self._context, token, keys, later=later)
        self._door: Door | None = None
        address: str | None = None
        try:
            if advertise != NO_WAY_IN:
                self._door = Door(self._socket, interface, self._gate, size, ports)
                address = self._door.address if advertise is None else advertised(advertise, self._door.port)
        except ConfigError:
            self.close(linger=False)
            raise
        self.me = Peer(rank, address, token, keys.public if keys else None)
        # Of a socket a poller tells only what can be read; of its descriptor also that there is room again.
        self._for_messages, self._for_room = zmq.Poller(), zmq.Poller()
        self._for_messages.register(self._socket, _POLLIN)
        self._for_room.register(self._socket.fileno(), _POLLIN)
        for poller in (self._for_messages, self._for_room):
            poller.register(self._monitor, _POLLIN)
            poller.register(self._gate.questions, _POLLIN)

    def open(self, others: Sequence[Peer], listener: Listener) -> None:
        self._listener = listener
        for peer in others:
            self.dismiss(peer.rank)
            self._peers[peer.rank] = peer
            for name in (peer.token, peer.token + _URGENT):
                self._inboxes[name] = peer.rank, Inbox(self.piece, self._pool)
        coming = [peer for peer in others if connects(peer, self.me)]
        self._urgent_due |= {peer.rank for peer in coming}
        self._gate.admit(coming)
        if self._door is not None:
            self._door.open()
        for peer in others:
            if connects(self.me, peer):
                self._connect(peer)

    def _connect(self, peer: Peer) -> None:
        assert peer.address is not None
        self._gate.approach(self._socket, self.me.rank, peer)
        self._socket.setsockopt(zmq.IPV6, "[" in peer.address)
        for suffix in (b"", _URGENT):
            self._socket.setsockopt(zmq.ROUTING_ID, self.me.token + suffix)
            self._socket.setsockopt(zmq.CONNECT_ROUTING_ID, peer.token + suffix)
            self._socket.connect(peer.address)
        self._sending.put(peer.token + _URGENT, _OPEN, FIRST, 0)

    def dismiss(self, rank: int) -> None:
        self._urgent.discard(rank)
        self._urgent_due.discard(rank)
        peer = self._peers.pop(rank, None)
        if peer is None:
            return
        self._gate.dismiss(rank)
        for name in (peer.token, peer.token + _URGENT):
            del self._inboxes[name]
            self._sending.close(name, PeerLost(rank, "its connection is gone"))

    def expects(self, count: int) -> None:
        self._due = count
        self._mind_the_door()

    def failed_at(self, rank: int) -> bool:
        return rank in self._peers and self._peers[rank].address in self._connections.failed

    # --- sending ----------------------------------------------------------------------------------------------------

    @property
    def held_nbytes(self) -> int:
        return self._sending.held_nbytes

    def send(self, rank: int, frames: Sequence[Frame], *, priority: int = 0, view: int = 0) -> Pending[None]:
        try:
            return self._put(rank, frames, priority, view)
        except PeerLost as error:
            return failed(error)

    def say(self, rank: int, frames: Sequence[Frame], *, last: bool = False) -> None:
        self._put(rank, frames, LAST if last else FIRST, 0)
        self._flush()

    def withdraw(self, view: int) -> None:
        self._sending.withdraw(view)

    def _put(self, rank: int, frames: Sequence[Frame], priority: int, view: int) -> Pending[None]:
        if rank not in self._peers:
            raise PeerLost(rank, "its connection is gone")
        token = self._peers[rank].token
        urgent = priority < 0 and rank in self._urgent
        return self._sending.put(token + _URGENT if urgent else token, frames, priority, view)

    def _flush(self) -> None:
        self._unreachable.update(self._sending.flush())

    # --- hearing ----------------------------------------------------------------------------------------------------

    def watch(self, fd: int, readable: Callable[[], None]) -> None:
        for poller in (self._for_messages, self._for_room):
            poller.register(fd, _POLLIN)
        self._watched[fd] = readable

    def poll(self, timeout_s: float | None) -> None:
        self._flush()
        poller = self._for_messages
        if self._sending.waits:
            poller = self._for_room
            look_again_s = 0.0 if self._readable() else LOOK_AGAIN_S
            timeout_s = look_again_s if timeout_s is None else min(timeout_s, look_again_s)
        events = dict(poller.poll(None if timeout_s is None else max(0, math.ceil(timeout_s * 1000))))
        if self._gate.questions in events:
            self._gate.answer()
        if self._socket in events or (poller is self._for_room and self._readable()):
            self._receive(BURST)
        if self._monitor in events or self._connections.any_closed or self._unreachable:
            self._look_for_losses()
        for fd in self._watched.keys() & events.keys():
            self._watched[fd]()

    def close(self, *, linger: bool) -> None:
        if linger:
            self._send_the_rest()
        if self._door is not None:
            self._door.close()
        self._connections.close()
        self._gate.close()
        self._socket.close(linger=LINGER_S * 1000 if linger else 0)
        self._context.term()

    def _send_the_rest(self) -> None:
        """Hands over to ZeroMQ what waits for room, which sends it while it lingers."""
        until = time.monotonic() + LINGER_S
        while self._sending.waits and time.monotonic() < until:
            for name in self._sending.flush():
                self._sending.close(name, Withdrawn())
            if self._sending.waits:
                zmq.select([self._socket.fileno()], [], [], LOOK_AGAIN_S)

    def _readable(self) -> bool:
        return bool(self._socket.getsockopt(_EVENTS) & _POLLIN)  # type: ignore[operator]

    def _receive(self, most: float) -> None:
        """Reads so many parcels, or all there are; there is one."""
        receive = self._socket.recv
        more = True
        while more:
            sender = receive()
            frames = [receive(copy=False)]
            while frames[-1].more:
                frames.append(receive(copy=False))
            try:
                self._take(sender, frames)
            except WireError as error:
                self._refuse(error)
            most -= 1
            more = most > 0 and self._readable()

    def _refuse(self, error: WireError) -> None:
        self.refused += 1
        self._report(f"a message ({error})")

    def _take(self, sender: bytes, frames: Sequence[zmq.Frame]) -> None:
        if sender not in self._inboxes:
            raise Unauthorized("a message from nobody of this run")
        rank, inbox = self._inboxes[sender]
        self._prove(sender, rank, frames[0])
        assert self._listener is not None
        parcel = [frame.buffer for frame in frames]
        try:
            messages = inbox.take(parcel, self.max_nbytes)
        except WireError as error:
            messages = [error]
        for message in messages:
            if isinstance(message, WireError):
                self._refuse(message)
                self._listener.malformed(rank, sum(map(len, parcel)), str(message))
                return
            try:
                if message.kind is Kind.OPEN:
                    self._opened(sender, rank)
                else:
                    self._listener.arrived(rank, message)
            except WireError as error:
                self._refuse(error)

    def _opened(self, sender: bytes, rank: int) -> None:
        """A connection for urgent messages is there; who has opened it is told so."""
        if sender != self._peers[rank].token + _URGENT:
            raise Unauthorized("a connection opened under another's name")
        self._urgent.add(rank)
        if rank in self._urgent_due:
            self._urgent_due.discard(rank)
            self._mind_the_door()
            self._sending.put(sender, _OPEN, FIRST, 0)

    def _prove(self, sender: bytes, rank: int, frame: zmq.Frame) -> None:
        """Holds the first message over a connection against what that has proved; all others come over the same one."""
        descriptor = frame.get(zmq.SRCFD)
        if self._connections.owner_of(descriptor) == sender:
            return
        peer = self._peers[rank]
        due = self._gate.name_of(peer) if connects(peer, self.me) else None
        if self._gate.named(frame) != due:
            raise Unauthorized("a message under another's name")
        self._connections.bind(descriptor, sender)
        if not self._within_a_machine:
            _hold_little(descriptor, self.piece)

    def _look_for_losses(self) -> None:
        self._connections.read()
        # What a peer sent before it went is in the socket by now, its farewell too.
        if self._readable():
            self._receive(math.inf)
        closed, strangers = self._connections.take_closed()
        unreachable, self._unreachable = self._unreachable, set()
        if strangers:
            self.turned_away += strangers
            self._report("a connection")
        self._mind_the_door()
        for name in dict.fromkeys((*closed, *sorted(unreachable))):
            if name in self._inboxes and name not in self._told:
                self._lost(name, self._inboxes[name][0])
            else:
                self._sending.close(name, Withdrawn())
        for rank, peer in self._peers.items():
            if peer.address in self._connections.denied and rank not in self._denied:
                assert self._listener is not None
                self._denied.add(rank)
                self._listener.denied(rank)

    def _lost(self, name: bytes, rank: int) -> None:
        token = self._peers[rank].token
        self._told.add(name)
        if name != token:
            self._urgent.discard(rank)
            self._sending.divert(name, token)
            return
        self._sending.close(name, PeerLost(rank, "its connection is gone"))
        assert self._listener is not None
        self._listener.closed(rank)

    def _mind_the_door(self) -> None:
        if self._door is not None:
            self._door.mind(self._due + len(self._urgent_due), self._connections.waiting)

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


def _hold_little(descriptor: int, nbytes: int) -> None:
    """Has the kernel take no more for a connection than so many bytes that it cannot send yet."""
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, nbytes)
