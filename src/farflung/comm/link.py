"""One TCP connection, plain or with TLS: its states, what leaves over it and what arrives."""

from __future__ import annotations

import errno
import fcntl
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from enum import IntEnum
from typing import NamedTuple, Protocol

from farflung.comm.framing import (
    LEAST_PIECE,
    LOCAL_PIECE,
    MOST_PIECE,
    PIECE_S,
    SEALED_PIECE,
    Chunk,
    Receiver,
    Sender,
)
from farflung.comm.loop import Loop
from farflung.comm.wire import Frame, Message, WireError

__all__ = ["Link", "Owner", "Path", "State"]

_NOTSENT_LOWAT = 0x201 if sys.platform == "darwin" else 25
_SIOCOUTQ, _SO_NWRITE = 0x5411, 0x1024
"""How Linux and macOS tell of bytes that are not acknowledged."""
_TCP_INFO_NBYTES = 160
"""Of the kernel's ``struct tcp_info``, up to the number of data segments that were sent."""
_MOST_BUFFERS = 64
"""Of one system call."""
_KEEPALIVE_S = 30
_RECEIVED = 1 << 18
"""Encrypted bytes that are read at once."""
_LOOK_S = 0.05
"""How often the size of a piece follows the rate of a connection that is busy."""
_AGAIN = (BlockingIOError, InterruptedError)


class Path(NamedTuple):
    """What the kernel has found of the way of a connection.

    Args:
      round_trip_s: in seconds.
      loss: the share of segments that were sent again.
      control: the name of the congestion control.
    """

    round_trip_s: float
    loss: float
    control: str


class State(IntEnum):
    """Where a connection stands."""

    CONNECTING = 0
    SHAKING = 1
    """TLS is being set up."""
    STRANGER = 2
    """The two ends have not proved which ranks they are."""
    MEMBER = 3
    CLOSING = 4
    """What is queued leaves; what arrives is dropped."""
    GONE = 5


class Owner(Protocol):
    """What is told of a connection."""

    def connected(self, link: Link) -> None:
        """The connection is there, and TLS where there is any."""
        ...

    def heard(self, link: Link, said: bytes) -> None:
        """The bytes are there that :meth:`Link.expect` has asked for."""
        ...

    def arrived(self, link: Link, message: Message) -> None:
        """A message has arrived."""
        ...

    def malformed(self, link: Link, nbytes: int, error: WireError) -> None:
        """Bytes of a member cannot be read."""
        ...

    def busy(self, link: Link) -> None:
        """The connection has had more to send than it could for some time more."""
        ...

    def gone(self, link: Link, was: State, error: Exception | None) -> None:
        """The connection has ended, in which state and why; ``None``: it was closed from the other end."""
        ...


class Link:
    """One connection.

    Args:
      loop: waits for it.
      owner: is told of it.
      sock: not blocking.
      dialled: the rank that it was made to; ``None``: it was accepted.
      tls: the settings of its encryption; ``None``: it has none.
    """

    def __init__(
        self, loop: Loop, owner: Owner, sock: socket.socket, dialled: int | None, tls: ssl.SSLContext | None
    ) -> None:
        self.sock, self.dialled = sock, dialled
        self.rank = dialled
        """Of the peer, as far as it is known."""
        self.index = 0
        """Among the connections to the peer."""
        self.nonce = b""
        """What this end has challenged the other with."""
        self.retry: Callable[[], None] = lambda: None
        """Makes the connection again, later."""
        self.state = State.CONNECTING
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        self.busy_s, self.busy_nbytes = 0.0, 0
        """For how long there was more to send than could be, and what was sent in that time."""
        self._loop, self._owner = loop, owner
        self._tls: ssl.SSLObject | None = None
        if tls is not None:
            self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            self._tls = tls.wrap_bio(self._incoming, self._outgoing, server_side=dialled is None)
            self._received = memoryview(bytearray(0))
        self._links: Mapping[int, Link] = {}
        self._due, self._said = 0, b""
        self._out: list[memoryview] = []
        self._chunk: Chunk | None = None
        self._piece, self._adapts = LEAST_PIECE, True
        self._blocked_at: float | None = None
        self._looked_at, self._since = 0.0, 0
        self._broken = False
        """Whether nothing can be sent any more."""
        with suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            idle = "TCP_KEEPALIVE" if sys.platform == "darwin" else "TCP_KEEPIDLE"
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, idle), _KEEPALIVE_S)

    # --- up to a member ---------------------------------------------------------------------------------------------

    def connect(self, address: tuple[str, int]) -> None:
        """Begins to connect."""
        error = self.sock.connect_ex(address)
        if error in (0, errno.EINPROGRESS):
            self._loop.watch(self.sock.fileno(), writable=self._connects)
        else:
            self.end(OSError(error, "connect"))

    def _connects(self) -> None:
        if self.state is State.CONNECTING:
            error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self.end(OSError(error, "connect"))
            else:
                self.begin()

    def begin(self) -> None:
        """Goes on with a connection that is there."""
        self.state = State.STRANGER if self._tls is None else State.SHAKING
        self._listen()
        if self._tls is None:
            self._owner.connected(self)
        else:
            self._received = memoryview(bytearray(1 << 12))
            self._guarded(self._decrypt)

    def certificate(self) -> bytes | None:
        """The certificate that the other end has proved to have the key of, in DER."""
        return None if self._tls is None else self._tls.getpeercert(True)

    def expect(self, nbytes: int) -> None:
        """Tells the owner when so many bytes more are there."""
        self._due, self._said = nbytes, b""

    def say(self, said: bytes) -> None:
        """Sends a few bytes of the introduction."""
        self._load([said])
        self._guarded(self._write)

    def promote(self, rank: int, sender: Sender, receiver: Receiver, links: Mapping[int, Link]) -> None:
        """The other end has proved to be a member.

        Args:
          rank: of the member.
          sender: what leaves.
          receiver: what arrives.
          links: all connections to it, by number.
        """
        self.rank, self.sender, self.receiver, self._links = rank, sender, receiver, links
        self.state = State.MEMBER
        if self._tls is not None:
            self._received = memoryview(bytearray(_RECEIVED))
        if self._within_a_machine():
            self._piece, self._adapts = (LOCAL_PIECE if self._tls is None else SEALED_PIECE), False
        else:
            self._hold_little()
        self.flush()

    def _within_a_machine(self) -> bool:
        with suppress(OSError):
            return bool(self.sock.getpeername()[0] == self.sock.getsockname()[0])
        return False

    # --- sending ----------------------------------------------------------------------------------------------------

    @property
    def unsent(self) -> int:
        """Bytes that were taken from the queue and have not left."""
        return sum(map(len, self._out))

    def flush(self) -> None:
        """Sends what there is room for."""
        if not self._out and self.state is State.MEMBER and not self._broken:
            self._guarded(self._write)

    def _write(self) -> None:
        while self._out or self._next():
            try:
                sent = self.sock.sendmsg(self._out[:_MOST_BUFFERS])
            except _AGAIN:
                if self._blocked_at is None:
                    self._blocked_at = self._looked_at = time.monotonic()
                    self._since = 0
                    self._listen()
                return
            except OSError:
                if self.state is not State.MEMBER:
                    raise
                # What has arrived before is read first; then reading tells that this is the end.
                self._broken = True
                self._out.clear()
                return
            self._since += sent
            while sent:
                first = self._out[0]
                if len(first) > sent:
                    self._out[0] = first[sent:]
                    break
                sent -= len(first)
                del self._out[0]
            if self._blocked_at is not None and self._adapts:
                self._adapt()
        if self._blocked_at is not None:
            self._blocked_at = None
            self._listen()
        if self.state is State.CLOSING:
            self.sock.shutdown(socket.SHUT_WR)

    def _next(self) -> bool:
        """Takes the next bytes from the queue; whether there are any."""
        chunk, self._chunk = self._chunk, None
        if self.sender is None:
            return False
        if chunk is not None:
            self.sender.left(chunk)
        if self.state is State.GONE:
            return False
        self._chunk = self.sender.take(self._piece, first=self.index == 0)
        if self._chunk is None:
            return False
        self._load(self._chunk.buffers)
        return True

    def _load(self, buffers: Iterable[Frame]) -> None:
        if self._tls is None:
            self._out += map(memoryview, buffers)
            return
        for buffer in buffers:
            rest = memoryview(buffer)
            while rest:
                rest = rest[self._tls.write(rest) :]
        self._load_encrypted()

    def _load_encrypted(self) -> None:
        if self._outgoing.pending:
            self._out.append(memoryview(self._outgoing.read()))

    def _adapt(self) -> None:
        """Makes a piece what the connection sends in :data:`PIECE_S`."""
        now = time.monotonic()
        took_s = now - self._looked_at
        if took_s < _LOOK_S:
            return
        rate = self._since / took_s
        self.busy_s += took_s
        self.busy_nbytes += self._since
        self._looked_at, self._since = now, 0
        piece = int(min(max(rate * PIECE_S, LEAST_PIECE), MOST_PIECE))
        if not 0.8 < piece / self._piece < 1.25:
            self._piece = piece
            self._hold_little()
        self._owner.busy(self)

    def _hold_little(self) -> None:
        """Has the kernel take no more than a piece that it cannot send yet."""
        with suppress(OSError):
            self.sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, self._piece)

    def path(self) -> Path | None:
        """Reads what the kernel has found of the way; ``None`` where it does not tell, which only Linux does."""
        if sys.platform != "linux":
            return None
        found = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
        control = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        if len(found) < _TCP_INFO_NBYTES:
            return None
        (round_trip_us,), (again,), (segments,) = (
            struct.unpack_from("I", found, at) for at in (68, 100, 156)
        )
        return Path(round_trip_us / 1e6, again / max(1, segments), control.rstrip(b"\0").decode())

    # --- receiving --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Waits for what this connection waits for."""
        if self.state is State.GONE:
            return
        paused = self.receiver is not None and self.receiver.paused and self.state is State.MEMBER
        self._loop.watch(
            self.sock.fileno(),
            readable=None if paused else self.read,
            writable=None if self._blocked_at is None else self._write_on,
        )

    def _write_on(self) -> None:
        if self.state is not State.GONE:
            self._guarded(self._write)

    def read(self) -> bool:
        """Reads once; whether there may be more."""
        if self.state is State.GONE or (self.receiver is not None and self.receiver.paused):
            return False
        return self._guarded(self._read)

    def resume(self) -> None:
        """Reads on where a piece has waited for the head of its message."""
        if self.receiver is not None and self.receiver.paused and self.state is State.MEMBER:
            self._guarded(self._go_on)

    def _go_on(self) -> bool:
        self._take(0)
        if self._tls is not None:
            self._decrypt()
        self._listen()
        return True

    def _guarded(self, step: Callable[[], object]) -> bool:
        try:
            return bool(step())
        except _AGAIN:
            return False
        except WireError as error:
            nbytes = self.receiver.nbytes if self.receiver is not None else 0
            self._owner.malformed(self, nbytes if error.nbytes is None else error.nbytes, error)
        except ssl.SSLZeroReturnError:
            self.end(None)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            self.end(error)
        return False

    def _read(self) -> bool:
        if self.state is State.CLOSING:
            if not self.sock.recv(1 << 16):
                self.end(None)
            return True
        if self._tls is not None:
            nbytes = self.sock.recv_into(self._received)
            if nbytes:
                self._incoming.write(self._received[:nbytes])
                self._decrypt()
        elif self.receiver is not None:
            nbytes, *_ = self.sock.recvmsg_into(self.receiver.room())
            if nbytes:
                self._take(nbytes)
        else:
            said = self.sock.recv(self._due - len(self._said))
            nbytes = len(said)
            self._hear(said)
        if not nbytes:
            self.end(None)
        return bool(nbytes)

    def _decrypt(self) -> bool:
        """Reads what TLS has, up to where it needs more."""
        tls = self._tls
        assert tls is not None
        try:
            if self.state is State.SHAKING:
                tls.do_handshake()
                self.state = State.STRANGER
                self._owner.connected(self)
            while self.state in (State.STRANGER, State.MEMBER):
                if self.receiver is None:
                    self._hear(tls.read(self._due - len(self._said)))
                elif self.receiver.paused:
                    break
                else:
                    room = self.receiver.room()[0]
                    self._take(tls.read(len(room), room))  # type: ignore[arg-type]
        except ssl.SSLWantReadError:
            pass
        finally:  # an alert leaves too
            if self.state is not State.GONE and self._outgoing.pending:
                self._load_encrypted()
                with suppress(OSError):
                    self._write()
        return True

    def _hear(self, said: bytes) -> None:
        self._said += said
        if said and len(self._said) == self._due:
            self._owner.heard(self, self._said)

    def _take(self, nbytes: int) -> None:
        assert self.receiver is not None
        for message in self.receiver.took(nbytes):
            if self.state is not State.MEMBER:
                return
            self._owner.arrived(self, message)
        if self.receiver.paused:
            self._listen()
        elif self.index == 0 and len(self._links) > 1:
            for link in tuple(self._links.values()):
                link.resume()

    # --- the end ----------------------------------------------------------------------------------------------------

    def close_soon(self) -> None:
        """Closes once what is queued has left; what arrives until then is dropped."""
        if self.state is State.MEMBER:
            self.state = State.CLOSING
            self._listen()
            self._guarded(self._write)
        elif self.state is not State.CLOSING:
            self.end(None)

    def settled(self) -> bool:
        """Whether the other end's kernel has all, so that closing takes nothing back."""
        return self.state is State.GONE or (not self._out and not _unacknowledged(self.sock))

    def end(self, error: Exception | None) -> None:
        """Closes at once."""
        if self.state is State.GONE:
            return
        was, self.state = self.state, State.GONE
        self._loop.watch(self.sock.fileno())
        self.sock.close()
        self._owner.gone(self, was, error)

    def abandon(self, error: Exception) -> None:
        """Ends with an error the messages of which it has a piece that will not leave."""
        chunk, self._chunk, self._out = self._chunk, None, []
        for message in chunk.pieces if chunk is not None else ():
            message.left.fail(error)


def _unacknowledged(sock: socket.socket) -> int:
    """Bytes that the other end's kernel has not acknowledged; 0 where this kernel does not tell."""
    with suppress(OSError):
        if sys.platform == "darwin":
            return sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
        (nbytes,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), _SIOCOUTQ, bytes(4)))
        return int(nbytes)
    return 0
