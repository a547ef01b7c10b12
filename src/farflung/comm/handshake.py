"""Handshake: connections of one process, accepted or made, that are not authenticated yet.

Each begins with an introduction. The acceptor sends a nonce. The dialer answers with its rank and a proof that
it knows the tokens of both, which the run's store reveals only to the run's processes. The acceptor proves the
same. With keys all of this is inside TLS, and the other end's certificate must be byte for byte the one
published for its rank: that the certificate verifies is not enough.

An unauthenticated connection costs a descriptor, has a deadline, and counts against a limit. At the limit, or
if no member is expected, nothing is accepted.
"""

from __future__ import annotations

import errno
import hmac
import secrets
import socket
import ssl
import struct
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from farflung.comm.connection import Connection, ConnectionState
from farflung.comm.framing import ENCRYPTED_PIECE_NBYTES
from farflung.comm.keys import build_tls_context, convert_to_der
from farflung.comm.loop import EventLoop
from farflung.comm.peer import CHALLENGE, HELLO, PROOF_NBYTES, VISITOR_RANK, Peer, should_connect
from farflung.comm.remote import Remote
from farflung.comm.wire import MAGIC, VERSION

if TYPE_CHECKING:
    from farflung.comm.tcp import TcpTransport

__all__ = ["MAX_UNAUTHENTICATED", "Handshaker"]

HANDSHAKE_S = 10.0
"""Seconds that a connection may take until both ends have proved their ranks."""
CROWDED_HANDSHAKE_S = 2.0
"""Seconds that it may take if more than half of :data:`MAX_UNAUTHENTICATED` connections are open."""
MAX_UNAUTHENTICATED = 64
"""Most unauthenticated connections at once, besides the expected members."""
RETRY_S, MAX_RETRY_S = 0.2, 5.0
"""Seconds until another attempt to connect, doubled each time, and their maximum."""
MAX_QUICK_RETRIES, QUICK_RETRY_S, LONG_RETRY_S = 200, 0.5, 1.5
"""Most quick attempts to reconnect to a rank, the seconds of each, and those of the first fourth one: the kernel
retransmits after 1 second. Fourth attempts double up to :data:`HANDSHAKE_S`, for links whose answer takes seconds."""
_MAX_ACCEPTS = 32
"""Most connections that are accepted in a row."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def _compute_proof(nonce: bytes, sender_token: bytes, receiver_token: bytes, *numbers: int) -> bytes:
    """Computes the proof, for one process and only this connection, that the sender knows both tokens."""
    return hmac.digest(
        receiver_token, nonce + sender_token + struct.pack(f"<{len(numbers)}I", *numbers), "sha256"
    )


class Handshaker:
    """Handshakes of a transport's unauthenticated connections.

    Args:
      transport: Transport that handles authenticated connections.
      loop: Event loop that watches the sockets.
      remotes: Peers that are accepted or connected to, by rank.
      server_socket: Listening socket; None if no peer can connect.
      num_expected: Number of connections to accept.
      allow_late: True if peers may come after the first meeting.
    """

    def __init__(
        self,
        transport: TcpTransport,
        loop: EventLoop,
        remotes: dict[int, Remote],
        server_socket: socket.socket | None,
        num_expected: int,
        allow_late: bool,
    ) -> None:
        self._transport, self._loop, self._remotes, self._allows_late = transport, loop, remotes, allow_late
        self.server_socket, self.num_expected = server_socket, num_expected
        self.connections: set[Connection] = set()
        """Open connections, with or without authentication."""
        self.scratch = memoryview(bytearray(ENCRYPTED_PIECE_NBYTES))
        """Buffer for encrypted bytes on their way to TLS."""
        self.visit_handler: tuple[bytes, Callable[[bytes], bytes]] | None = None
        """Key that visitors prove that they know, and the function that answers them."""
        self.server_context: ssl.SSLContext | None = None
        """TLS settings for accepted connections; None if they must be rebuilt."""
        self.is_paused = False
        """True while nothing is accepted for lack of descriptors."""
        self._is_closed = True
        """True while nothing is accepted or connected, before the first meeting and at the end."""
        self._is_accepting = False

    @property
    def unauthenticated(self) -> list[Connection]:
        """Connections whose ends have not proved their ranks."""
        return [
            connection
            for connection in self.connections
            if connection.state <= ConnectionState.UNAUTHENTICATED
        ]

    def start(self) -> None:
        """Starts to accept and make connections."""
        self._is_closed = False

    def connect(self, member: Remote, index: int, retry_s: float = RETRY_S) -> None:
        """Connects to a peer; retries after ``retry_s`` seconds on failure."""
        peer = member.peer
        if self._is_closed or member.has_ended:
            return
        host, port = peer.host_and_port
        context = None
        try:
            if self._transport.keys is not None:
                context = build_tls_context(self._transport.keys, [peer.key or ""], is_server=False)
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        except OSError:  # no descriptor is free
            self._loop.call_later(MAX_RETRY_S, partial(self.connect, member, index, retry_s))
            return
        sock.setblocking(False)
        connection = Connection(self._loop, self, sock, peer.rank, context)
        connection.index = index
        if should_connect(self._transport.local_peer, peer):  # not a probe
            is_quick = member.is_reconnect and member.num_retries < MAX_QUICK_RETRIES
            retry = partial(
                self.connect, member, index, retry_s if is_quick else min(2 * retry_s, MAX_RETRY_S)
            )
            connection.retry = partial(self._loop.call_later, retry_s, retry)
            if is_quick:
                num_long, turn = divmod(member.num_retries, 4)
                member.num_retries += 1
                limit_s = QUICK_RETRY_S if turn < 3 else min(LONG_RETRY_S * 2**num_long, HANDSHAKE_S)
                self._limit_time(connection, limit_s, ConnectionState.CONNECTING)
        self._limit_time(connection, HANDSHAKE_S)
        connection.connect((host, port))

    def _accept(self) -> None:
        assert self.server_socket is not None
        for _ in range(_MAX_ACCEPTS):
            if not self._is_accepting:
                return
            try:
                context = self._get_server_context()
                sock, _ = self.server_socket.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self.is_paused = True
                    self._loop.call_later(1.0, self._resume)
                    self.update_accepting()
                    return
                continue  # it was closed before it was accepted
            sock.setblocking(False)
            connection = Connection(self._loop, self, sock, None, context)
            is_crowded = (
                sum(pending.dialed_rank is None for pending in self.unauthenticated)
                > MAX_UNAUTHENTICATED // 2
            )
            self._limit_time(connection, min(CROWDED_HANDSHAKE_S, HANDSHAKE_S) if is_crowded else HANDSHAKE_S)
            connection.start_handshake()
            self.update_accepting()

    def _limit_time(
        self,
        connection: Connection,
        seconds: float,
        last_state: ConnectionState = ConnectionState.UNAUTHENTICATED,
    ) -> None:
        """Ends a connection unless it is beyond a state within ``seconds``."""
        self.connections.add(connection)

        def give_up() -> None:
            if connection.state <= last_state:
                connection.end(TimeoutError())

        self._loop.call_later(seconds, give_up)

    def _resume(self) -> None:
        self.is_paused = False
        self.update_accepting()

    def update_accepting(self) -> None:
        """Updates the watch of the listening socket: accepts if a member is expected and the limit is not reached."""
        if self.server_socket is None or self._is_closed:
            return
        missing = sum(
            member.num_wanted - len(member.connections)
            for member in self._remotes.values()
            if member.connections and should_connect(member.peer, self._transport.local_peer)
        )
        expected = self.num_expected + missing
        num_open = sum(connection.dialed_rank is None for connection in self.unauthenticated)
        accepts = (
            (expected > 0 or self.visit_handler is not None)
            and num_open < MAX_UNAUTHENTICATED + expected
            and not self.is_paused
        )
        if accepts != self._is_accepting:
            self._is_accepting = accepts
            self._loop.watch(self.server_socket.fileno(), readable=self._accept if accepts else None)

    def _get_server_context(self) -> ssl.SSLContext | None:
        """Returns the TLS settings for accepted connections, which know the members' certificates."""
        if self._transport.keys is not None and self.server_context is None:
            peers = [member.peer.key or "" for member in self._remotes.values()]
            self.server_context = build_tls_context(self._transport.keys, peers, is_server=True)
            if self.visit_handler is not None:
                self.server_context.verify_mode = ssl.CERT_OPTIONAL  # a visitor shows none, and a member must
        return self.server_context

    def start_introduction(self, connection: Connection) -> None:
        """Starts the introduction on a connection, after any TLS handshake."""
        if connection.dialed_rank is None:
            connection.nonce = secrets.token_bytes(16)
            connection.send_introduction(
                CHALLENGE.pack(MAGIC, VERSION, connection.nonce), expected_nbytes=HELLO.size
            )
        elif self._has_certificate_of(connection, self._remotes[connection.dialed_rank].peer):
            connection.send_introduction(b"", expected_nbytes=CHALLENGE.size)
        else:
            connection.end(ConnectionError("another certificate"))

    def _has_certificate_of(self, connection: Connection, peer: Peer) -> bool:
        return self._transport.keys is None or (
            connection.tls is not None
            and connection.tls.get_peer_certificate() == convert_to_der(peer.key or "")
        )

    def handle_introduction(self, connection: Connection, data: bytes) -> None:
        """Handles a part of the introduction."""
        if connection.on_bytes is not None:
            connection.on_bytes(data)
            return
        if connection.dialed_rank is None:
            self._authenticate_peer(connection, *HELLO.unpack(data))
            return
        member = self._remotes[connection.dialed_rank]
        local_token, peer_token = self._transport.local_peer.token, member.peer.token
        if connection.nonce:
            if hmac.compare_digest(data, _compute_proof(connection.nonce, peer_token, local_token)):
                member.add_connection(connection)
                self.update_accepting()
            else:
                connection.end(ConnectionError("another rank"))
            return
        magic, version, nonce = CHALLENGE.unpack(data)
        if (magic, version) != (MAGIC, VERSION):
            connection.end(ConnectionError("another protocol or version"))
            return
        connection.nonce = secrets.token_bytes(16)
        proof = _compute_proof(
            nonce, local_token, peer_token, self._transport.local_peer.rank, connection.index
        )
        connection.send_introduction(
            HELLO.pack(self._transport.local_peer.rank, connection.index, connection.nonce, proof),
            expected_nbytes=PROOF_NBYTES,
        )

    def _authenticate_peer(
        self, connection: Connection, rank: int, index: int, nonce: bytes, proof: bytes
    ) -> None:
        """Authenticates the dialer of an accepted connection."""
        if rank == VISITOR_RANK and self.visit_handler is not None:
            self._authenticate_visitor(connection, self.visit_handler, nonce, proof)
            return
        member = self._remotes.get(rank)
        local_token = self._transport.local_peer.token
        if (
            member is None
            or not hmac.compare_digest(
                proof, _compute_proof(connection.nonce, member.peer.token, local_token, rank, index)
            )
            or not self._has_certificate_of(connection, member.peer)
        ):
            connection.end(ConnectionError("no member"))
            return
        if member.has_ended or not should_connect(member.peer, self._transport.local_peer):
            connection.state = ConnectionState.AUTHENTICATED  # it comes too early, or is a probe
            connection.end(None)
            return
        if index in member.connections or index >= (member.num_wanted if member.connections else 1):
            connection.end(ConnectionError("no member"))
            return
        connection.index = index
        connection.send_introduction(_compute_proof(nonce, local_token, member.peer.token))
        if connection.state is not ConnectionState.CLOSED:
            member.add_connection(connection)
            self.update_accepting()

    def _authenticate_visitor(
        self,
        connection: Connection,
        handler: tuple[bytes, Callable[[bytes], bytes]],
        nonce: bytes,
        proof: bytes,
    ) -> None:
        """Authenticates a visitor; see :mod:`farflung.comm.visits`."""
        from farflung.comm.visits import LENGTH, MAX_NBYTES, compute_visit_proof

        (key, answer), nonces = handler, connection.nonce + nonce
        if not hmac.compare_digest(
            proof, compute_visit_proof(key, "visitor", nonces, self._transport.local_peer.key)
        ):
            connection.end(ConnectionError("no visitor"))
            return

        def handle_question(question: bytes) -> None:
            text = answer(question)
            connection.send_and_close(LENGTH.pack(len(text)) + text)
            self.update_accepting()

        def handle_length(header: bytes) -> None:
            (nbytes,) = LENGTH.unpack(header)
            connection.on_bytes = handle_question
            if 0 < nbytes <= MAX_NBYTES:
                connection.send_introduction(b"", expected_nbytes=nbytes)
            else:
                connection.end(ConnectionError("no question"))

        connection.on_bytes = handle_length
        connection.send_introduction(
            compute_visit_proof(key, "member", nonces, self._transport.local_peer.key),
            expected_nbytes=LENGTH.size,
        )

    def handle_end(self, connection: Connection, old_state: ConnectionState, error: Exception | None) -> None:
        """Handles the end of a connection without a peer, which was in ``old_state``."""
        if self._is_closed or old_state > ConnectionState.UNAUTHENTICATED:
            return
        if connection.dialed_rank is None:
            self._transport.refusals.count_connection()
        elif connection.dialed_rank in self._remotes:
            self._handle_failure(self._remotes[connection.dialed_rank], connection, old_state, error)
        self.update_accepting()

    def _handle_failure(
        self, member: Remote, connection: Connection, old_state: ConnectionState, error: Exception | None
    ) -> None:
        """Handles a failed attempt to connect or authenticate."""
        if member.is_reconnect and isinstance(error, ConnectionRefusedError):
            self._transport.listener.handle_process_end(member.peer.rank)
            return
        if old_state is not ConnectionState.CONNECTING and not isinstance(error, TimeoutError):
            member.has_failed_auth = True
        is_alert = isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or "")
        if is_alert and old_state is ConnectionState.UNAUTHENTICATED and not self._allows_late:
            # It has shown its certificate, and now refuses this one's; before that anyone could send an alert.
            self._transport.listener.handle_denial(member.peer.rank)
        connection.retry()

    def close(self) -> None:
        """Closes all unauthenticated connections and the listening socket."""
        self._is_closed = True
        for connection in self.unauthenticated:
            connection.end(None)
        if self.server_socket is not None:
            self._loop.watch(self.server_socket.fileno())
            self.server_socket.close()
