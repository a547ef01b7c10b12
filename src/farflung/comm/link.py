"""One TCP connection, plain or with TLS: its state, its outgoing and its incoming bytes."""

from __future__ import annotations

import errno
import fcntl
import socket
import ssl
import struct
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from farflung.comm.framing import LEAST_PIECE_NBYTES, LOCAL_PIECE_NBYTES, SEALED_PIECE_NBYTES, piece_nbytes
from farflung.comm.loop import Loop
from farflung.comm.records import Chunk, Receiver, Sender
from farflung.comm.wire import Frame, WireError

if TYPE_CHECKING:
    from farflung.comm.tcp import TcpTransport

__all__ = ["Link", "Path", "State"]

_NOTSENT_LOWAT = 0x201 if sys.platform == "darwin" else 25
_KEEPIDLE = 0x10 if sys.platform == "darwin" else 4
_KEEPALIVE_S = 30
_SIOCOUTQ, _SO_NWRITE = 0x5411, 0x1024
"""Requests of Linux and macOS for the number of unacknowledged bytes."""
_TCP_INFO_NBYTES = 168
"""Size of the kernel's ``struct tcp_info`` up to the delivery rate."""
_LOOK_S = 0.05
"""Interval at which a busy connection adapts its piece size to its rate, in seconds."""
_MUCH = 1 << 15
"""Number of bytes from which on a read is likely followed by another."""
_AGAIN = (BlockingIOError, InterruptedError)


class Path(NamedTuple):
    """The kernel's measurements of a connection.

    Args:
      round_trip_s: Smoothed round trip, in seconds.
      loss: Share of segments that were retransmitted.
      control: Name of the congestion control.
      rate_bps: Latest delivery rate.
    """

    round_trip_s: float
    loss: float
    control: str
    rate_bps: float


class State(IntEnum):
    """State of a connection."""

    CONNECTING = 0
    SHAKING = 1
    """TLS is being set up."""
    STRANGER = 2
    """The two ends have not proved their ranks."""
    MEMBER = 3
    CLOSING = 4
    """Queued bytes are sent; incoming bytes are dropped."""
    GONE = 5


class Link:
    """One TCP connection.

    Args:
      loop: Event loop that watches the socket.
      owner: Transport that handles its events.
      sock: Non-blocking socket.
      dialed_rank: Rank that it was made to; None if it was accepted.
      tls: TLS settings; None for a plain connection.
    """

    def __init__(
        self,
        loop: Loop,
        owner: TcpTransport,
        sock: socket.socket,
        dialled: int | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.sock, self.dialled = sock, dialled
        self.rank, self.index = dialled, 0
        """Rank of the peer, once known, and number of this connection among those to it."""
        self.nonce = b""
        """Nonce of this end's challenge."""
        self.hears: Callable[[bytes], None] | None = None
        """Handles a visitor's bytes instead of the owner."""
        self.retry: Callable[[], None] = lambda: None
        """Schedules another attempt to connect."""
        self.state = State.CONNECTING
        self.receiver: Receiver | None = None
        self.read_s = time.monotonic()
        """Time of the last bytes received, in seconds."""
        self.read_nbytes = 0
        """Bytes received so far."""
        self.busy_s, self.busy_nbytes = 0.0, 0
        """Seconds in which there was more to send than the kernel took, and bytes sent in that time."""
        self._loop, self._owner, self._tls, self._fd = loop, owner, tls, sock.fileno()
        self._sender: Sender | None = None
        self._links: Mapping[int, Link] = {}
        self._due, self._said = 0, b""
        self._secure: ssl.SSLObject | None = None
        self._sealed, self._unsealed = ssl.MemoryBIO(), ssl.MemoryBIO()
        """Bytes of TLS to be sent; bytes received that TLS has not read."""
        self._out: list[memoryview] = []
        self._chunk: Chunk | None = None
        self._piece, self._adapts = LEAST_PIECE_NBYTES, True
        self._blocked, self._broken = False, False
        """True if the kernel accepts no bytes now; or never again."""
        self._looked_at, self._since = 0.0, 0

    def give_up_connecting(self) -> None:
        """Ends the connection if the other end has not answered yet."""
        if self.state is State.CONNECTING:
            self.end(TimeoutError())

    # --- up to a member ---------------------------------------------------------------------------------------------

    def connect(self, address: tuple[str, int]) -> None:
        """Starts to connect."""
        error = self.sock.connect_ex(address)
        if error in (0, errno.EINPROGRESS):
            self._loop.watch(self._fd, writable=self._connects)
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
        """Starts the handshake of an established connection."""
        with suppress(OSError):  # the other end may be gone
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.sock.setsockopt(socket.IPPROTO_TCP, _KEEPIDLE, _KEEPALIVE_S)
        self.state = State.SHAKING
        self._guarded(self._begin)

    def _begin(self) -> None:
        if self._tls is not None:
            is_server = self.dialled is None
            self._secure = self._tls.wrap_bio(self._unsealed, self._sealed, server_side=is_server)
        self._listen()
        self._shake()

    def _shake(self) -> None:
        while self._secure is not None:
            try:
                self._secure.do_handshake()
                break
            except ssl.SSLWantReadError:
                pass
            finally:  # the alert of an error is sent too
                self._put()
                with suppress(OSError):
                    self._write()
            if not self._fill():
                self.end(None)
                return
        self.state = State.STRANGER
        self._owner.entrance.connected(self)

    def certificate(self) -> bytes | None:
        """Returns the other end's authenticated certificate in DER; None without TLS or certificate."""
        return None if self._secure is None else self._secure.getpeercert(True)

    def say(self, said: bytes, *, expects: int = 0) -> None:
        """Sends a part of the introduction; the owner is called when ``expected_nbytes`` of the answer have arrived."""
        self._due, self._said = expects, b""
        if said:
            self._put(said)
            self._guarded(self._write)

    def promote(self, rank: int, sender: Sender, receiver: Receiver, links: Mapping[int, Link]) -> None:
        """Marks the connection as authenticated.

        Args:
          rank: Rank of the member.
          sender: Outgoing messages.
          receiver: Parser of incoming bytes.
          siblings: All connections to the member, by number.
        """
        self.rank, self._sender, self.receiver, self._links = rank, sender, receiver, links
        self.state = State.MEMBER
        with suppress(OSError):
            self._adapts = self.sock.getpeername()[0] != self.sock.getsockname()[0]
        if self._adapts:
            self._hold(self._piece)
        else:
            self._piece = LOCAL_PIECE_NBYTES if self._tls is None else SEALED_PIECE_NBYTES
        self.flush()

    # --- sending ----------------------------------------------------------------------------------------------------

    @property
    def unsent(self) -> int:
        """Bytes that were taken from the queue and have not left."""
        return sum(map(len, self._out))

    def flush(self) -> None:
        """Sends as much as the kernel accepts."""
        if not self._blocked and self.state is State.MEMBER:
            try:
                self._write()
            except (OSError, ValueError) as error:  # an SSLError is an OSError
                self.end(error)

    def _write(self) -> None:
        while not self._broken and self.state is not State.GONE and (self._out or self._next()):
            try:
                sent = self.sock.sendmsg(self._out)
            except _AGAIN:
                self._wait()
                return
            except OSError:
                if self.state is not State.MEMBER:
                    raise
                self._broken = True  # bytes that arrived before are read first; reading then finds the end
                self._out.clear()
                return
            self._since += sent
            while sent:
                first = self._out[0]
                self._out[0] = first[sent:]
                sent -= min(sent, len(first))
                if not self._out[0]:
                    del self._out[0]
            if self._blocked and self._adapts:
                self._adapt()
            if self._adapts and not self._out and self._sender and self._sender.has(first=self.index == 0):
                self._wait()  # the next piece is taken when the kernel has sent most of this one
                return
        if self._blocked:
            self._blocked = False
            self._listen()
        if self.state is State.CLOSING:
            self.sock.shutdown(socket.SHUT_WR)

    def _wait(self) -> None:
        """Waits until the kernel accepts more bytes."""
        if not self._blocked:
            self._blocked, self._looked_at, self._since = True, time.monotonic(), 0
            if self._adapts and (path := self.path()) is not None:
                self._resize(path.rate_bps)
            self._listen()

    def _next(self) -> bool:
        """Takes the next bytes from the queue; returns True if there are any."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            Sender.left(chunk)
        if self._sender is not None and self.state is not State.GONE:
            self._chunk = self._sender.take(self._piece, first=self.index == 0)
        if self._chunk is not None:
            self._put(*self._chunk.buffers)
        return self._chunk is not None

    def _put(self, *buffers: Frame) -> None:
        """Appends to the outgoing bytes; TLS encrypts them at once, so that the kernel takes many records together."""
        if self._secure is None:
            self._out += map(memoryview, buffers)
            return
        if buffers:
            self._secure.write(b"".join(buffers))
        if self._sealed.pending:
            self._out.append(memoryview(self._sealed.read()))

    def _adapt(self) -> None:
        """Adapts the piece size to the rate at which a busy connection sends."""
        time_s = time.monotonic()
        took_s = time_s - self._looked_at
        if took_s < _LOOK_S:
            return
        self._resize(8 * self._since / took_s)
        self.busy_s += took_s
        self.busy_nbytes += self._since
        self._looked_at, self._since = time_s, 0
        self._owner.busy(self)

    def _resize(self, rate_bps: float) -> None:
        """Sets the piece size to what the connection sends in :data:`farflung.comm.framing.PIECE_S`."""
        piece = piece_nbytes(rate_bps)
        if not 0.8 < piece / self._piece < 1.25:
            self._hold(piece)

    def _hold(self, piece: int) -> None:
        """Limits the unsent bytes that the kernel accepts to one piece."""
        self._piece = piece
        with suppress(OSError):
            self.sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, piece)

    def path(self) -> Path | None:
        """Reads the kernel's measurements of the connection; None except on Linux."""
        if sys.platform != "linux":
            return None
        info = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_NBYTES)
        control = self.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        if len(info) < _TCP_INFO_NBYTES:
            return None
        (round_trip_us,), (retransmitted,), (segments,) = (
            struct.unpack_from("I", info, at) for at in (68, 100, 156)
        )
        (nbytes_per_s,) = struct.unpack_from("Q", info, 160)
        name = control.rstrip(b"\0").decode()
        return Path(round_trip_us / 1e6, retransmitted / max(1, segments), name, 8.0 * nbytes_per_s)

    # --- receiving --------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        """Updates the events that the loop watches for this connection."""
        is_paused = self.receiver is not None and self.receiver.paused and self.state is State.MEMBER
        if self.state is not State.GONE:
            self._loop.watch(
                self._fd,
                readable=None if is_paused else self.read,
                writable=partial(self._guarded, self._write) if self._blocked else None,
            )

    def read(self) -> bool:
        """Reads available bytes, up to a piece; returns True if there may be more."""
        return self.state is not State.GONE and self._guarded(self._read)

    def resume(self) -> None:
        """Resumes reading after a pause for the head of a message."""
        if self.receiver is not None and self.receiver.paused and self.state is State.MEMBER:
            self._guarded(lambda: self._take(0))
            self.read()
            self._listen()

    def _guarded(self, step: Callable[[], bool | None]) -> bool:
        try:
            return bool(step())
        except _AGAIN:
            pass
        except WireError as error:
            nbytes = self.receiver.nbytes if self.receiver is not None else 0
            self._owner.malformed(self, nbytes if error.nbytes is None else error.nbytes, error)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            self.end(error)
        return False

    def _read(self) -> bool:
        if self.state is State.SHAKING:
            self._shake()
            if self.state is State.GONE:  # type: ignore[comparison-overlap]
                return False
        remaining_nbytes = LOCAL_PIECE_NBYTES
        while remaining_nbytes > 0:
            if self.state is State.CLOSING:
                nbytes = len(self.sock.recv(1 << 16))
            elif self.receiver is None:
                buffer = memoryview(bytearray(self._due - len(self._said)))
                nbytes = self._receive(buffer)
                self._said += buffer[:nbytes]
                if nbytes and len(self._said) == self._due:
                    self._owner.entrance.heard(self, self._said)
            elif self.receiver.paused:
                return False
            else:
                nbytes = self._receive(self.receiver.room())
                if nbytes:
                    self._take(nbytes)
            if not nbytes:
                self.end(None)
            if self.state is State.GONE:
                return False
            if self._secure is None and nbytes < _MUCH:
                return True
            remaining_nbytes -= nbytes
        if self._secure is not None and (self._unsealed.pending or self._secure.pending()):
            self._loop.call_later(0.0, self.read)
        return True

    def _receive(self, room: memoryview) -> int:
        """Reads bytes into a buffer; returns their number, 0 at the end."""
        if self._secure is None:
            return self._count(self.sock.recv_into(room))
        while True:
            try:
                return self._secure.read(len(room), room)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                if not self._fill():
                    return 0

    def _fill(self) -> bool:
        """Feeds received bytes to TLS; returns False at the end."""
        arrived = self._owner.scratch
        nbytes = self._count(self.sock.recv_into(arrived))
        self._unsealed.write(arrived[:nbytes])
        return nbytes > 0

    def _count(self, nbytes: int) -> int:
        """Counts received bytes; returns their number."""
        self.read_nbytes += nbytes
        self.read_s = time.monotonic()
        return nbytes

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

    def see_off(self, said: bytes) -> None:
        """Sends a visitor's answer, and closes once it has left."""
        self.state = State.MEMBER
        self._put(said)
        self.close_soon()

    def close_soon(self) -> None:
        """Closes once all queued bytes have left; drops bytes that arrive until then."""
        if self.state is State.MEMBER:
            self.state = State.CLOSING
            self._listen()
            self._guarded(self._write)
        elif self.state is not State.CLOSING:
            self.end(None)

    def unsettled_nbytes(self) -> int:
        """Counts bytes that the other end's kernel has not acknowledged; closing earlier discards them."""
        if self.state is State.GONE:
            return 0
        with suppress(OSError):
            if sys.platform == "darwin":
                return self.unsent + self.sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
            unacknowledged: int = struct.unpack("i", fcntl.ioctl(self.sock.fileno(), _SIOCOUTQ, bytes(4)))[0]
            return self.unsent + unacknowledged
        return self.unsent

    def end(self, error: Exception | None) -> None:
        if self.state is not State.GONE:
            old_state, self.state = self.state, State.GONE
            self._loop.watch(self._fd)
            self.sock.close()
            self._owner.gone(self, old_state, error)

    def abandon(self, error: Exception) -> None:
        """Fails the messages of which this connection holds an unsent piece."""
        chunk, self._chunk, self._out = self._chunk, None, []
        for message in chunk.pieces if chunk is not None else ():
            message.left.fail(error)
