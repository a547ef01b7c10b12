"""One TCP connection, plain or with TLS: its state, its outgoing and its incoming bytes."""

from __future__ import annotations

import errno
import fcntl
import socket
import ssl
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from enum import IntEnum
from functools import partial
from typing import TYPE_CHECKING

from farflung.comm.framing import LOCAL_PIECE_NBYTES, TLS_RECORD_NBYTES
from farflung.comm.loop import EventLoop
from farflung.comm.pieces import PieceSizer
from farflung.comm.records import Chunk, Receiver, Sender
from farflung.comm.tls import TlsStream
from farflung.comm.wire import Frame, WireError
from farflung.errors import PeerLost

if TYPE_CHECKING:
    from farflung.comm.handshake import Handshaker
    from farflung.comm.remote import Remote

__all__ = ["LINGER_S", "Connection", "ConnectionState"]

LINGER_S = 5.0
"""Seconds without any byte sent after which a closing transport gives up; for removed peers, seconds in all."""
BROKEN_CLOSE_S = 1.0
"""Seconds until a connection that sends no longer is closed: what has arrived is read first."""
_MAX_BUFFERS = 1024
"""Most buffers of one call of ``sendmsg``, by the limit of Linux and macOS (IOV_MAX)."""
_KEEPIDLE = 0x10 if sys.platform == "darwin" else 4
_KEEPALIVE_S = 30
_SIOCOUTQ, _SO_NWRITE = 0x5411, 0x1024
"""Requests of Linux and macOS for the number of unacknowledged bytes."""
_MANY_NBYTES = 1 << 15
"""Number of bytes from which on a read is likely followed by another."""
_WOULD_BLOCK = (BlockingIOError, InterruptedError)


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
      handshaker: Handshaker that authenticates the other end.
      sock: Non-blocking socket.
      dialed_rank: Rank that it was made to; None if it was accepted.
      tls_context: TLS settings; None for a plain connection.
    """

    def __init__(
        self,
        loop: EventLoop,
        handshaker: Handshaker,
        sock: socket.socket,
        dialed_rank: int | None,
        tls_context: ssl.SSLContext | None,
    ) -> None:
        self.sock, self.dialed_rank = sock, dialed_rank
        self.index = 0
        """Number of this connection among those to the peer."""
        self.nonce = b""
        """Nonce of this end's challenge."""
        self.on_bytes: Callable[[bytes], None] | None = None
        """Handles a visitor's bytes instead of the handshaker."""
        self.retry: Callable[[], None] = lambda: None
        """Schedules another attempt to connect."""
        self.state = ConnectionState.CONNECTING
        self.tls: TlsStream | None = None
        """TLS of the connection, from :meth:`start_handshake` on; None if it is plain."""
        self.remote: Remote | None = None
        """Peer at the other end, from :meth:`promote` on."""
        self.receiver: Receiver | None = None
        self.pieces = PieceSizer(sock)
        self.read_nbytes = 0
        """Bytes read so far."""
        self._has_more = False
        """True if the last read has left bytes in the kernel, presumably."""
        self._loop, self._handshaker, self._tls_context = loop, handshaker, tls_context
        self._fd = sock.fileno()
        self._expected_nbytes, self._introduction = 0, b""
        self._unsent: list[memoryview] = []
        self._chunk: Chunk | None = None
        self._is_blocked, self._is_broken = False, False
        """True if the kernel accepts no bytes now; or never again."""

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
        if self._tls_context is not None:
            self.tls = TlsStream(self._tls_context, is_server=self.dialed_rank is None)
        self._update_watch()
        self.read_available()

    def _continue_handshake(self) -> None:
        while self.tls is not None:
            try:
                is_done = self.tls.try_handshake()
            finally:  # the alert of an error is sent too
                self._append_unsent()
                self.flush()
            if is_done:
                break
            if not self._feed_tls():
                self.end(None)
                return
        self.state = ConnectionState.UNAUTHENTICATED
        self._handshaker.start_introduction(self)

    def send_introduction(self, data: bytes, *, expected_nbytes: int = 0) -> None:
        """Sends a part of the introduction; the handshaker handles ``expected_nbytes`` of the answer."""
        self._expected_nbytes, self._introduction = expected_nbytes, b""
        if data:
            self._append_unsent(data)
            self.flush()

    def promote(self, remote: Remote, receiver: Receiver) -> None:
        """Marks the connection as authenticated.

        Args:
          remote: Peer at the other end.
          receiver: Parser of incoming bytes.
        """
        self.remote, self.receiver = remote, receiver
        self.state = ConnectionState.AUTHENTICATED
        self.pieces.start(is_encrypted=self.tls is not None)
        self.flush()

    # --- sending ----------------------------------------------------------------------------------------------------

    @property
    def unsent_nbytes(self) -> int:
        """Bytes that were taken from the queue and have not left."""
        return sum(map(len, self._unsent))

    def flush(self, *, is_writable: bool = False) -> None:
        """Sends as much as the kernel accepts.

        Args:
          is_writable: True if the kernel accepts bytes again.
        """
        if self._is_blocked and not is_writable:
            return
        while (
            not self._is_broken
            and self.state is not ConnectionState.CLOSED
            and (self._unsent or self._take_chunk())
        ):
            try:
                sent = self.sock.sendmsg(self._unsent[:_MAX_BUFFERS])
            except _WOULD_BLOCK:
                self._watch_writable()
                return
            except OSError as error:
                self._is_broken = True  # bytes that arrived before are read first; reading then finds the end
                self._unsent.clear()
                self._loop.call_later(BROKEN_CLOSE_S, partial(self.end, error))
                return
            has_measured = self._is_blocked and self.pieces.record_sent(sent)
            while sent:
                first = self._unsent[0]
                self._unsent[0] = first[sent:]
                sent -= min(sent, len(first))
                if not self._unsent[0]:
                    del self._unsent[0]
            if self.remote is not None and self.pieces.is_adaptive:
                if has_measured:
                    self.remote.handle_busy(self)
                if not self._unsent and self.remote.sender.has_data(is_first_connection=self.index == 0):
                    self._watch_writable()  # the next piece is taken when the kernel has sent most of this one
                    return
        if self._is_blocked:
            self._is_blocked = False
            self._update_watch()
        if self.state is ConnectionState.CLOSING:
            with suppress(OSError):  # the other end is gone, which reading finds
                self.sock.shutdown(socket.SHUT_WR)

    def _watch_writable(self) -> None:
        """Asks the loop for a call when the kernel accepts more bytes, and starts to measure the rate."""
        if not self._is_blocked:
            self._is_blocked = True
            self.pieces.begin_busy()
            self._update_watch()

    def _take_chunk(self) -> bool:
        """Takes the next bytes from the queue; returns True if there are any."""
        chunk, self._chunk = self._chunk, None
        if chunk is not None:
            Sender.mark_sent(chunk)
        if self.remote is not None and self.state is not ConnectionState.CLOSED:
            self.pieces.expect_urgent(self.remote.sender.expects_urgent)
            self._chunk = self.remote.sender.take_chunk(
                self.pieces.nbytes, is_first_connection=self.index == 0
            )
        if self._chunk is not None:
            try:
                self._append_unsent(*self._chunk.buffers)
            except (OSError, ValueError) as error:  # of TLS
                self.end(error)
        return self._chunk is not None

    def _append_unsent(self, *buffers: Frame) -> None:
        """Appends to the outgoing bytes."""
        self._unsent += map(memoryview, buffers) if self.tls is None else self.tls.encrypt(*buffers)

    # --- receiving --------------------------------------------------------------------------------------------------

    @property
    def _is_paused(self) -> bool:
        """True if a piece has arrived before the head of its message, which another connection carries."""
        return (
            self.receiver is not None
            and self.receiver.is_paused
            and self.state is ConnectionState.AUTHENTICATED
        )

    def _update_watch(self) -> None:
        """Updates the events that the loop watches for this connection."""
        if self.state is not ConnectionState.CLOSED:
            self._loop.watch(
                self._fd,
                readable=None if self._is_paused else self.read_available,
                writable=partial(self.flush, is_writable=True) if self._is_blocked else None,
            )

    def resume(self) -> None:
        """Resumes reading after a pause for the head of a message."""
        if self._is_paused:
            self.read_available()
            self._update_watch()

    def read_available(self) -> bool:
        """Reads and handles available bytes, up to a piece; returns True if there may be more."""
        may_have_more = False
        try:
            may_have_more = self.state is not ConnectionState.CLOSED and self._read()
        except _WOULD_BLOCK:
            pass
        except (OSError, ValueError) as error:  # an SSLError is an OSError
            if isinstance(error, WireError) and self.remote is not None and self.receiver is not None:
                nbytes = self.receiver.record_nbytes if error.nbytes is None else error.nbytes
                self.remote.handle_malformed(nbytes, error)
            else:
                self.end(error)
        if self.state is ConnectionState.AUTHENTICATED and self.receiver is not None:
            self._await_rest(self.receiver.missing_nbytes)
        return may_have_more

    def _await_rest(self, piece_nbytes: int) -> None:
        """Has the kernel wait for the rest of the piece or TLS record under way, all of which the peer has handed over.

        Args:
          piece_nbytes: Bytes of the piece that have not been read.
        """
        if self.tls is not None and self.tls.missing_nbytes:
            piece_nbytes = self.tls.missing_nbytes + max(0, piece_nbytes - TLS_RECORD_NBYTES)
        self.pieces.await_nbytes(piece_nbytes)

    def _read(self) -> bool:
        """Reads as :meth:`read_available` does; returns False if the connection is closed or paused."""
        if self.state is ConnectionState.HANDSHAKING:
            self._continue_handshake()
        receive = self._read_socket if self.tls is None else self._read_tls
        remaining_nbytes = LOCAL_PIECE_NBYTES
        while remaining_nbytes > 0:
            if self.state is ConnectionState.CLOSED:
                return False
            if self.state is ConnectionState.CLOSING:
                nbytes = len(self.sock.recv(1 << 16))
            elif self.receiver is None:
                buffer = memoryview(bytearray(self._expected_nbytes - len(self._introduction)))
                nbytes = receive(buffer)
                self._introduction += buffer[:nbytes]
                if nbytes and len(self._introduction) == self._expected_nbytes:
                    self._handshaker.handle_introduction(self, self._introduction)
            elif self.receiver.is_paused:
                self._parse_bytes(0)
                if self.receiver.is_paused:
                    return False
                continue
            else:
                nbytes = receive(self.receiver.get_buffer())
                if nbytes:
                    self._parse_bytes(nbytes)
            if not nbytes:
                self.end(None)
            elif not self._has_more and not (self.tls is not None and self.tls.has_pending):
                return True
            remaining_nbytes -= nbytes
        if self.tls is not None and self.tls.has_pending:
            self._loop.call_later(0.0, self.read_available)
        return True

    def _read_socket(self, buffer: memoryview) -> int:
        """Reads available bytes into a buffer; returns their number, 0 if the other end has closed the connection."""
        nbytes = self.sock.recv_into(buffer)
        self.read_nbytes += nbytes
        self._has_more = nbytes >= _MANY_NBYTES
        return nbytes

    def _read_tls(self, buffer: memoryview) -> int:
        """Reads and decrypts as :meth:`_read_socket`."""
        assert self.tls is not None
        while (nbytes := self.tls.read(buffer)) is None:
            if not self._feed_tls():
                return 0
        return nbytes

    def _feed_tls(self) -> bool:
        """Feeds received bytes to TLS; returns False at the end."""
        assert self.tls is not None
        arrived = self._handshaker.scratch
        nbytes = self._read_socket(arrived)
        self.tls.feed(arrived[:nbytes])
        return nbytes > 0

    def _parse_bytes(self, nbytes: int) -> None:
        assert self.receiver is not None
        assert self.remote is not None
        for message in self.receiver.parse_bytes(nbytes):
            if self.state is not ConnectionState.AUTHENTICATED:
                return
            self.remote.transport.listener.handle_message(self.remote.peer.rank, message)
        if self.receiver.is_paused:
            self._update_watch()
        elif self.index == 0 and len(self.remote.connections) > 1:
            for connection in tuple(self.remote.connections.values()):
                connection.resume()

    # --- the end ----------------------------------------------------------------------------------------------------

    def send_and_close(self, answer: bytes) -> None:
        """Sends a visitor's answer, and closes once it has left, or after :data:`LINGER_S` seconds."""
        self.state = ConnectionState.AUTHENTICATED
        self._append_unsent(answer)
        self._loop.call_later(LINGER_S, partial(self.end, None))
        self.close_when_sent()

    def close_when_sent(self) -> None:
        """Closes once all queued bytes have left; drops bytes that arrive until then."""
        if self.state is ConnectionState.AUTHENTICATED:
            self.state = ConnectionState.CLOSING
            self._update_watch()
            self.flush()
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
        """Closes the connection, and fails the messages of which it holds an unsent piece."""
        if self.state is ConnectionState.CLOSED:
            return
        old_state, self.state = self.state, ConnectionState.CLOSED
        self._loop.watch(self._fd)
        self.sock.close()
        self._handshaker.connections.discard(self)
        chunk, self._chunk, self._unsent, self.tls = self._chunk, None, [], None
        if self.remote is None:
            self._handshaker.handle_end(self, old_state, error)
            return
        for message in chunk.pieces if chunk is not None else ():
            message.sent.set_exception(PeerLost(self.remote.peer.rank, "its connection is gone"))
        self.remote.handle_end(self)
