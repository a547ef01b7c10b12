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

from farflung.comm.framing import (
    ENCRYPTED_PIECE_NBYTES,
    LOCAL_PIECE_NBYTES,
    MIN_PIECE_NBYTES,
    compute_piece_nbytes,
)
from farflung.comm.loop import EventLoop
from farflung.comm.records import Chunk, Receiver, Sender
from farflung.comm.wire import Frame, WireError

if TYPE_CHECKING:
    from farflung.comm.tcp import TcpTransport

__all__ = ["Connection", "ConnectionState", "TcpInfo"]

_NOTSENT_LOWAT = 0x201 if sys.platform == "darwin" else 25
_KEEPIDLE = 0x10 if sys.platform == "darwin" else 4
_KEEPALIVE_S = 30
_SIOCOUTQ, _SO_NWRITE = 0x5411, 0x1024
"""Requests of Linux and macOS for the number of unacknowledged bytes."""
_TCP_INFO_NBYTES = 168
"""Size of the kernel's ``struct tcp_info`` up to the delivery rate."""
_ADAPT_INTERVAL_S = 0.05
"""Interval at which a busy connection adapts its piece size to its rate, in seconds."""
_MANY_NBYTES = 1 << 15
"""Number of bytes from which on a read is likely followed by another."""
_WOULD_BLOCK = (BlockingIOError, InterruptedError)


class TcpInfo(NamedTuple):
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


class ConnectionState(IntEnum):
    """State of a connection."""

    CONNECTING = 0
    HANDSHAKING = 1
    """TLS is being set up."""
    UNAUTHENTICATED = 2
    """The two ends have not proved their ranks."""
    AUTHENTICATED = 3
    CLOSING = 4
    """Queued bytes are sent; incoming bytes are dropped."""
    CLOSED = 5


class Connection:
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
        loop: EventLoop,
        owner: TcpTransport,
        sock: socket.socket,
        dialed_rank: int | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self.sock, self.dialed_rank = sock, dialed_rank
        self.rank, self.index = dialed_rank, 0
        """Rank of the peer, once known, and number of this connection among those to it."""
        self.nonce = b""
        """Nonce of this end's challenge."""
        self.on_bytes: Callable[[bytes], None] | None = None
        """Handles a visitor's bytes instead of the owner."""
        self.retry: Callable[[], None] = lambda: None
        """Schedules another attempt to connect."""
        self.state = ConnectionState.CONNECTING
        self.receiver: Receiver | None = None
        self.last_read_s = time.monotonic()
        """Time of the last bytes received, in seconds."""
        self.read_nbytes = 0
        """Bytes received so far."""
        self.busy_s, self.busy_nbytes = 0.0, 0
        """Seconds in which there was more to send than the kernel took, and bytes sent in that time."""
        self._loop, self._owner, self._tls_context, self._fd = loop, owner, tls, sock.fileno()
        self._sender: Sender | None = None
        self._siblings: Mapping[int, Connection] = {}
        self._expected_nbytes, self._introduction = 0, b""
        self._tls_object: ssl.SSLObject | None = None
        self._tls_outgoing, self._tls_incoming = ssl.MemoryBIO(), ssl.MemoryBIO()
        """Bytes of TLS to be sent; bytes received that TLS has not read."""
        self._unsent: list[memoryview] = []
        self._chunk: Chunk | None = None
        self._piece_nbytes, self._is_adaptive = MIN_PIECE_NBYTES, True
        self._is_blocked, self._is_broken = False, False
        """True if the kernel accepts no bytes now; or never again."""
        self._measured_s, self._measured_nbytes = 0.0, 0

    def give_up_connecting(self) -> None:
        """Ends the connection if the other end has not answered yet."""
        if self.state is ConnectionState.CONNECTING:
            self.end(TimeoutError())

    # --- up to a member ---------------------------------------------------------------------------------------------

    def connect(self, address: tuple[str, int]) -> None:
        """Starts to connect."""
        error = self.sock.connect_ex(address)
        if error in (0, errno.EINPROGRESS):
            self._loop.watch(self._fd, writable=self._finish_connect)
        else:
            self.end(OSError(error, "connect"))

    def _finish_connect(self) -> None:
        if self.state is ConnectionState.CONNECTING:
            error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self.end(OSError(error, "connect"))
            else:
                self.start_handshake()

    def start_handshake(self) -> None:
        """Starts the handshake of an established connection."""
        with suppress(OSError):  # the other end may be gone
            self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            self.sock.setsockopt(socket.IPPROTO_TCP, _KEEPIDLE, _KEEPALIVE_S)
        self.state = ConnectionState.HANDSHAKING
        self._run_guarded(self._start_tls)

    def _start_tls(self) -> None:
        if self._tls_context is not None:
            is_server = self.dialed_rank is None
            self._tls_object = self._tls_context.wrap_bio(
                self._tls_incoming, self._tls_outgoing, server_side=is_server
            )
        self._update_watch()
        self._continue_handshake()

    def _continue_handshake(self) -> None:
        while self._tls_object is not None:
            try:
                self._tls_object.do_handshake()
                break
            except ssl.SSLWantReadError:
                pass
            finally:  # the alert of an error is sent too
                self._append_unsent()
                with suppress(OSError):
                    self._send_pending()
            if not self._feed_tls():
                self.end(None)
                return
        self.state = ConnectionState.UNAUTHENTICATED
        self._owner.handshaker.start_introduction(self)

    def get_peer_certificate(self) -> bytes | None:
        """Returns the other end's authenticated certificate in DER; None without TLS or certificate."""
        return None if self._tls_object is None else self._tls_object.getpeercert(True)

    def send_introduction(self, data: bytes, *, expected_nbytes: int = 0) -> None:
        """Sends a part of the introduction; the owner is called when ``expected_nbytes`` of the answer have arrived."""
        self._expected_nbytes, self._introduction = expected_nbytes, b""
        if data:
            self._append_unsent(data)
            self._run_guarded(self._send_pending)

    def promote(
        self, rank: int, sender: Sender, receiver: Receiver, siblings: Mapping[int, Connection]
    ) -> None:
        """Marks the connection as authenticated.

        Args:
          rank: Rank of the member.
          sender: Outgoing messages.
          receiver: Parser of incoming bytes.
          siblings: All connections to the member, by number.
        """
        self.rank, self._sender, self.receiver, self._siblings = rank, sender, receiver, siblings
        self.state = ConnectionState.AUTHENTICATED
        with suppress(OSError):
            self._is_adaptive = self.sock.getpeername()[0] != self.sock.getsockname()[0]
        if self._is_adaptive:
            self._set_piece_nbytes(self._piece_nbytes)
        else:
            self._piece_nbytes = LOCAL_PIECE_NBYTES if self._tls_context is None else ENCRYPTED_PIECE_NBYTES
        self.flush()

    # --- sending ----------------------------------------------------------------------------------------------------

    @property
    def unsent_nbytes(self) -> int:
        """Bytes that were taken from the queue and have not left."""
        return sum(map(len, self._unsent))

    def flush(self) -> None:
        """Sends as much as the kernel accepts."""
        if not self._is_blocked and self.state is ConnectionState.AUTHENTICATED:
            try:
                self._send_pending()
            except (OSError, ValueError) as error:  # an SSLError is an OSError
                self.end(error)

    def _send_pending(self) -> None:
        while (
            not self._is_broken
            and self.state is not ConnectionState.CLOSED
            and (self._unsent or self._take_chunk())
        ):
            try:
                sent = self.sock.sendmsg(self._unsent)
            except _WOULD_BLOCK:
                self._watch_writable()
                return
            except OSError:
                if self.state is not ConnectionState.AUTHENTICATED:
                    raise
                self._is_broken = True  # bytes that arrived before are read first; reading then finds the end
                self._unsent.clear()
                return
            self._measured_nbytes += sent
            while sent:
                first = self._unsent[0]
                self._unsent[0] = first[sent:]
                sent -= min(sent, len(first))
                if not self._unsent[0]:
                    del self._unsent[0]
            if self._is_blocked and self._is_adaptive:
                self._adapt()
            if (
                self._is_adaptive
                and not self._unsent
                and self._sender
                and self._sender.has_data(is_first_connection=self.index == 0)
            ):
                self._watch_writable()  # the next piece is taken when the kernel has sent most of this one
                return
        if self._is_blocked:
            self._is_blocked = False
            self._update_watch()
        if self.state is ConnectionState.CLOSING:
            self.sock.shutdown(socket.SHUT_WR)

    def _watch_writable(self) -> None:
        """Asks the loop for a call when the kernel accepts more bytes, and starts to measure the rate."""
        if not self._is_blocked:
            self._is_blocked, self._measured_s, self._measured_nbytes = True, time.monotonic(), 0
            if self._is_adaptive and (path := self.read_tcp_info()) is not None:
                self._adapt_piece_size(path.rate_bps)
            self._update_watch()

    def _take_chunk(self) -> bool:
        """Takes the next bytes from the queue; returns True if there are any."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            Sender.mark_sent(chunk)
        if self._sender is not None and self.state is not ConnectionState.CLOSED:
            self._chunk = self._sender.take_chunk(self._piece_nbytes, is_first_connection=self.index == 0)
        if self._chunk is not None:
            self._append_unsent(*self._chunk.buffers)
        return self._chunk is not None

    def _append_unsent(self, *buffers: Frame) -> None:
        """Appends to the outgoing bytes; TLS encrypts them at once, so that the kernel takes many records together."""
        if self._tls_object is None:
            self._unsent += map(memoryview, buffers)
            return
        if buffers:
            self._tls_object.write(b"".join(buffers))
        if self._tls_outgoing.pending:
            self._unsent.append(memoryview(self._tls_outgoing.read()))

    def _adapt(self) -> None:
        """Adapts the piece size to the rate at which a busy connection sends."""
        time_s = time.monotonic()
        took_s = time_s - self._measured_s
        if took_s < _ADAPT_INTERVAL_S:
            return
        self._adapt_piece_size(8 * self._measured_nbytes / took_s)
        self.busy_s += took_s
        self.busy_nbytes += self._measured_nbytes
        self._measured_s, self._measured_nbytes = time_s, 0
        self._owner.handle_busy(self)

    def _adapt_piece_size(self, rate_bps: float) -> None:
        """Sets the piece size to the bytes sent in :data:`farflung.comm.framing.PIECE_S`, if it differs by 20 %."""
        piece = compute_piece_nbytes(rate_bps)
        if not 0.8 < piece / self._piece_nbytes < 1.25:
            self._set_piece_nbytes(piece)

    def _set_piece_nbytes(self, nbytes: int) -> None:
        """Limits the unsent bytes that the kernel accepts to one piece."""
        self._piece_nbytes = nbytes
        with suppress(OSError):
            self.sock.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, nbytes)

    def read_tcp_info(self) -> TcpInfo | None:
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
        return TcpInfo(round_trip_us / 1e6, retransmitted / max(1, segments), name, 8.0 * nbytes_per_s)

    # --- receiving --------------------------------------------------------------------------------------------------

    def _update_watch(self) -> None:
        """Updates the events that the loop watches for this connection."""
        is_paused = (
            self.receiver is not None
            and self.receiver.is_paused
            and self.state is ConnectionState.AUTHENTICATED
        )
        if self.state is not ConnectionState.CLOSED:
            self._loop.watch(
                self._fd,
                readable=None if is_paused else self.read_available,
                writable=partial(self._run_guarded, self._send_pending) if self._is_blocked else None,
            )

    def read_available(self) -> bool:
        """Reads available bytes, up to a piece; returns True if there may be more."""
        return self.state is not ConnectionState.CLOSED and self._run_guarded(self._read_available)

    def resume(self) -> None:
        """Resumes reading after a pause for the head of a message."""
        if (
            self.receiver is not None
            and self.receiver.is_paused
            and self.state is ConnectionState.AUTHENTICATED
        ):
            self._run_guarded(lambda: self._parse_bytes(0))
            self.read_available()
            self._update_watch()

    def _run_guarded(self, step: Callable[[], bool | None]) -> bool:
        try:
            return bool(step())
        except _WOULD_BLOCK:
            pass
        except WireError as error:
            nbytes = self.receiver.record_nbytes if self.receiver is not None else 0
            self._owner.handle_malformed(self, nbytes if error.nbytes is None else error.nbytes, error)
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            self.end(error)
        return False

    def _read_available(self) -> bool:
        """Reads and processes available bytes, up to a piece; returns False if the connection is closed or paused."""
        if self.state is ConnectionState.HANDSHAKING:
            self._continue_handshake()
            if self.state is ConnectionState.CLOSED:  # type: ignore[comparison-overlap]
                return False
        remaining_nbytes = LOCAL_PIECE_NBYTES
        while remaining_nbytes > 0:
            if self.state is ConnectionState.CLOSING:
                nbytes = len(self.sock.recv(1 << 16))
            elif self.receiver is None:
                buffer = memoryview(bytearray(self._expected_nbytes - len(self._introduction)))
                nbytes = self._receive(buffer)
                self._introduction += buffer[:nbytes]
                if nbytes and len(self._introduction) == self._expected_nbytes:
                    self._owner.handshaker.handle_introduction(self, self._introduction)
            elif self.receiver.is_paused:
                return False
            else:
                nbytes = self._receive(self.receiver.get_buffer())
                if nbytes:
                    self._parse_bytes(nbytes)
            if not nbytes:
                self.end(None)
            if self.state is ConnectionState.CLOSED:
                return False
            if self._tls_object is None and nbytes < _MANY_NBYTES:
                return True
            remaining_nbytes -= nbytes
        if self._tls_object is not None and (self._tls_incoming.pending or self._tls_object.pending()):
            self._loop.call_later(0.0, self.read_available)
        return True

    def _receive(self, buffer: memoryview) -> int:
        """Reads available bytes into a buffer; returns their number, 0 if the other end has closed the connection."""
        if self._tls_object is None:
            return self._count_read(self.sock.recv_into(buffer))
        while True:
            try:
                return self._tls_object.read(len(buffer), buffer)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                if not self._feed_tls():
                    return 0

    def _feed_tls(self) -> bool:
        """Feeds received bytes to TLS; returns False at the end."""
        arrived = self._owner.scratch
        nbytes = self._count_read(self.sock.recv_into(arrived))
        self._tls_incoming.write(arrived[:nbytes])
        return nbytes > 0

    def _count_read(self, nbytes: int) -> int:
        """Counts received bytes; returns their number."""
        self.read_nbytes += nbytes
        self.last_read_s = time.monotonic()
        return nbytes

    def _parse_bytes(self, nbytes: int) -> None:
        assert self.receiver is not None
        for message in self.receiver.parse_bytes(nbytes):
            if self.state is not ConnectionState.AUTHENTICATED:
                return
            self._owner.handle_message(self, message)
        if self.receiver.is_paused:
            self._update_watch()
        elif self.index == 0 and len(self._siblings) > 1:
            for link in tuple(self._siblings.values()):
                link.resume()

    # --- the end ----------------------------------------------------------------------------------------------------

    def send_and_close(self, answer: bytes) -> None:
        """Sends a visitor's answer, and closes once it has left."""
        self.state = ConnectionState.AUTHENTICATED
        self._append_unsent(answer)
        self.close_when_sent()

    def close_when_sent(self) -> None:
        """Closes once all queued bytes have left; drops bytes that arrive until then."""
        if self.state is ConnectionState.AUTHENTICATED:
            self.state = ConnectionState.CLOSING
            self._update_watch()
            self._run_guarded(self._send_pending)
        elif self.state is not ConnectionState.CLOSING:
            self.end(None)

    def count_undelivered_nbytes(self) -> int:
        """Counts bytes that are queued here or unacknowledged by the peer's kernel; closing earlier discards them."""
        if self.state is ConnectionState.CLOSED:
            return 0
        with suppress(OSError):
            if sys.platform == "darwin":
                return self.unsent_nbytes + self.sock.getsockopt(socket.SOL_SOCKET, _SO_NWRITE)
            unacknowledged: int = struct.unpack("i", fcntl.ioctl(self.sock.fileno(), _SIOCOUTQ, bytes(4)))[0]
            return self.unsent_nbytes + unacknowledged
        return self.unsent_nbytes

    def end(self, error: Exception | None) -> None:
        if self.state is not ConnectionState.CLOSED:
            old_state, self.state = self.state, ConnectionState.CLOSED
            self._loop.watch(self._fd)
            self.sock.close()
            self._owner.handle_end(self, old_state, error)

    def fail_unsent(self, error: Exception) -> None:
        """Fails the messages of which this connection holds an unsent piece."""
        chunk, self._chunk, self._unsent = self._chunk, None, []
        for message in chunk.pieces if chunk is not None else ():
            message.sent.set_exception(error)
