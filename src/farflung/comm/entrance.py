"""Handshake: connections of one process, accepted or made, that are not authenticated yet.

Each begins with an introduction. The acceptor sends a nonce. The dialer answers with its rank and a proof that
it knows the tokens of both, which the run's store reveals to the run's processes alone. The acceptor proves the
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
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from farflung.comm.keys import certificate_of, tls_context
from farflung.comm.link import Link, State
from farflung.comm.loop import Loop
from farflung.comm.peer import CHALLENGE, HELLO, PROOF_NBYTES, VISITOR, Peer, connects
from farflung.comm.records import Landings, Sender
from farflung.comm.wire import MAGIC, VERSION

if TYPE_CHECKING:
    from farflung.comm.tcp import TcpTransport

__all__ = ["CROWD", "Entrance", "Remote"]

HANDSHAKE_S = 10.0
"""Seconds that a connection may take until both ends have proved their ranks."""
CROWDED_S = 2.0
"""Seconds that it may take if more than half of :data:`MAX_UNAUTHENTICATED` connections are open."""
CROWD = 64
"""Most unauthenticated connections at once, besides the expected members."""
RETRY_S, RETRY_MOST_S = 0.2, 5.0
"""Seconds until another attempt to connect, doubled each time, and their maximum."""
QUICK_DIALS, QUICK_S = 200, (0.5, 0.5, 0.5, 1.5)
"""Most quick attempts to reconnect to a rank, and the seconds of each, in turn: the kernel retransmits after 1
second."""
_BURST = 32
"""Most connections that are accepted in a row."""
_NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


def _proof(nonce: bytes, of: bytes, to: bytes, *said: int) -> bytes:
    """Computes the proof, for one process and this connection alone, that the sender knows both tokens."""
    return hmac.digest(to, nonce + of + struct.pack(f"<{len(said)}I", *said), "sha256")


@dataclass(eq=False)
class Remote:
    """State of a peer that is accepted or connected to.

    Args:
      peer: Address and credentials of the peer.
      recv_buffers: Partial messages from it.
    """

    peer: Peer
    landings: Landings
    sender: Sender = field(default_factory=Sender)
    links: dict[int, Link] = field(default_factory=dict)
    """Connections, by number."""
    wanted: int = 1
    """Number of requested connections."""
    ended: bool = False
    """True once its connections have ended."""
    again: bool = False
    """True if it was connected before."""
    dials: int = 0
    """Number of quick attempts to reconnect."""
    failed: bool = False
    """True if a process at its address failed to authenticate as this peer."""
    settled: bool = False
    """True if more connections have not helped."""
    looked_s: float = 0.0
    sent: int = 0
    rate_bps: float = 0.0
    """Busy seconds of the first connection, bytes that all had sent, and their rate, at the last measurement."""


class Entrance:
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
        loop: Loop,
        remotes: dict[int, Remote],
        door: socket.socket | None,
        due: int,
        later: bool,
    ) -> None:
        self._transport, self._loop, self._remotes, self._later = transport, loop, remotes, later
        self.door, self.due = door, due
        self.early: set[Link] = set()
        """Unauthenticated connections."""
        self.visits: tuple[bytes, Callable[[bytes], bytes]] | None = None
        """Key that visitors prove that they know, and the function that answers them."""
        self.tls: ssl.SSLContext | None = None
        """TLS settings for accepted connections; None if they must be rebuilt."""
        self.rests = False
        """True while nothing is accepted for lack of descriptors."""
        self._closes = True
        """True while nothing is accepted or connected, before the first meeting and at the end."""
        self._reads_door = False

    def open(self) -> None:
        """Starts to accept and make connections."""
        self._closes = False

    def dial(self, member: Remote, index: int, again_s: float = RETRY_S) -> None:
        """Connects to a peer; retries after ``retry_s`` seconds on failure."""
        peer = member.peer
        if self._closes or member.ended or self._remotes.get(peer.rank) is not member:
            return
        host, port = peer.host_and_port
        try:
            sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
        except OSError:  # no descriptor is free
            self._loop.call_later(RETRY_MOST_S, partial(self.dial, member, index, again_s))
            return
        sock.setblocking(False)
        context = (
            None
            if self._transport.keys is None
            else tls_context(self._transport.keys, [peer.key or ""], server=False)
        )
        connection = Link(self._loop, self._transport, sock, peer.rank, context)
        connection.index = index
        if connects(self._transport.me, peer):  # not a probe
            is_quick = member.again and member.dials < QUICK_DIALS
            retry = partial(self.dial, member, index, again_s if is_quick else min(2 * again_s, RETRY_MOST_S))
            connection.retry = partial(self._loop.call_later, again_s, retry)
            if is_quick:
                member.dials += 1
                self._loop.call_later(QUICK_S[member.dials % len(QUICK_S)], connection.give_up_connecting)
        self._await(connection, HANDSHAKE_S)
        connection.connect((host, port))

    def _accept(self) -> None:
        assert self.door is not None
        for _ in range(_BURST):
            if not self._reads_door:
                return
            try:
                sock, _ = self.door.accept()
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                if error.errno in _NO_DESCRIPTORS:
                    self.rests = True
                    self._loop.call_later(1.0, self._rested)
                    self.mind()
                    return
                continue  # it was closed before it was accepted
            sock.setblocking(False)
            connection = Link(self._loop, self._transport, sock, None, self._server_context())
            is_crowded = sum(pending.dialled is None for pending in self.early) > CROWD // 2
            self._await(connection, min(CROWDED_S, HANDSHAKE_S) if is_crowded else HANDSHAKE_S)
            connection.begin()
            self.mind()

    def _await(self, link: Link, seconds: float) -> None:
        """Ends a connection unless it authenticates within ``seconds``."""
        self.early.add(link)

        def give_up() -> None:
            if link in self.early:
                link.end(TimeoutError())

        self._loop.call_later(seconds, give_up)

    def _rested(self) -> None:
        self.rests = False
        self.mind()

    def mind(self) -> None:
        """Updates the watch of the listening socket: accepts if a member is expected and the limit is not reached."""
        if self.door is None or self._closes:
            return
        missing = sum(
            member.wanted - len(member.links)
            for member in self._remotes.values()
            if member.links and connects(member.peer, self._transport.me)
        )
        expected = self.due + missing
        num_open = sum(connection.dialled is None for connection in self.early)
        accepts = (expected > 0 or self.visits is not None) and num_open < CROWD + expected and not self.rests
        if accepts != self._reads_door:
            self._reads_door = accepts
            self._loop.watch(self.door.fileno(), readable=self._accept if accepts else None)

    def _server_context(self) -> ssl.SSLContext | None:
        """Returns the TLS settings for accepted connections, which know the members' certificates."""
        if self._transport.keys is not None and self.tls is None:
            peers = [member.peer.key or "" for member in self._remotes.values()]
            self.tls = tls_context(self._transport.keys, peers, server=True)
            if self.visits is not None:
                self.tls.verify_mode = ssl.CERT_OPTIONAL  # a visitor shows none, and a member must
        return self.tls

    def connected(self, link: Link) -> None:
        """Starts the introduction on a connection, after any TLS handshake."""
        if link.dialled is None:
            link.nonce = secrets.token_bytes(16)
            link.say(CHALLENGE.pack(MAGIC, VERSION, link.nonce), expects=HELLO.size)
        elif self._is_of(link, self._remotes[link.dialled].peer):
            link.say(b"", expects=CHALLENGE.size)
        else:
            link.end(ConnectionError("another certificate"))

    def _is_of(self, link: Link, peer: Peer) -> bool:
        return self._transport.keys is None or link.certificate() == certificate_of(peer.key or "")

    def heard(self, link: Link, said: bytes) -> None:
        """Handles a part of the introduction."""
        if link.hears is not None:
            link.hears(said)
            return
        if link.dialled is None:
            self._introduced(link, *HELLO.unpack(said))
            return
        member = self._remotes[link.dialled]
        local_token, peer_token = self._transport.me.token, member.peer.token
        if link.nonce:
            if hmac.compare_digest(said, _proof(link.nonce, peer_token, local_token)):
                self._transport.promote(member, link)
            else:
                link.end(ConnectionError("another rank"))
            return
        magic, version, nonce = CHALLENGE.unpack(said)
        if (magic, version) != (MAGIC, VERSION):
            link.end(ConnectionError("another protocol or version"))
            return
        link.nonce = secrets.token_bytes(16)
        proof = _proof(nonce, local_token, peer_token, self._transport.me.rank, link.index)
        link.say(HELLO.pack(self._transport.me.rank, link.index, link.nonce, proof), expects=PROOF_NBYTES)

    def _introduced(self, link: Link, rank: int, index: int, nonce: bytes, proof: bytes) -> None:
        """Authenticates the dialer of an accepted connection."""
        if rank == VISITOR and self.visits is not None:
            self._visited(link, self.visits, nonce, proof)
            return
        member = self._remotes.get(rank)
        local_token = self._transport.me.token
        if (
            member is None
            or not hmac.compare_digest(proof, _proof(link.nonce, member.peer.token, local_token, rank, index))
            or not self._is_of(link, member.peer)
        ):
            link.end(ConnectionError("no member"))
            return
        if member.ended or not connects(member.peer, self._transport.me):
            self.early.discard(link)  # it comes too early, or is a probe
            link.end(None)
            return
        if index in member.links or index >= (member.wanted if member.links else 1):
            link.end(ConnectionError("no member"))
            return
        link.index = index
        link.say(_proof(nonce, local_token, member.peer.token))
        if link.state is not State.GONE:
            self._transport.promote(member, link)

    def _visited(
        self, link: Link, visits: tuple[bytes, Callable[[bytes], bytes]], nonce: bytes, proof: bytes
    ) -> None:
        """Authenticates a visitor; see :mod:`farflung.comm.visits`."""
        from farflung.comm.visits import LENGTH, MOST_NBYTES, visit_proof

        (key, answer), nonces = visits, link.nonce + nonce
        if not hmac.compare_digest(proof, visit_proof(key, "visitor", nonces, self._transport.me.key)):
            link.end(ConnectionError("no visitor"))
            return

        def handle_question(question: bytes) -> None:
            self.early.discard(link)
            self._transport.see_off(link)
            text = answer(question)
            link.see_off(LENGTH.pack(len(text)) + text)
            self.mind()

        def handle_length(header: bytes) -> None:
            (nbytes,) = LENGTH.unpack(header)
            link.hears = handle_question
            if 0 < nbytes <= MOST_NBYTES:
                link.say(b"", expects=nbytes)
            else:
                link.end(ConnectionError("no question"))

        link.hears = handle_length
        link.say(visit_proof(key, "member", nonces, self._transport.me.key), expects=LENGTH.size)

    def gone(self, link: Link, remote: Remote | None, was: State, error: Exception | None) -> None:
        """Handles the end of an unauthenticated connection."""
        self.early.discard(link)
        if self._closes:
            return
        if link.dialled is None:
            self._transport.turn_away()
        elif remote is not None:
            self._miss(remote, link, was, error)
        self.mind()

    def _miss(self, member: Remote, link: Link, was: State, error: Exception | None) -> None:
        """Handles a failed attempt to connect or authenticate."""
        if member.again and isinstance(error, ConnectionRefusedError):
            self._transport.listener.ended(member.peer.rank)
            return
        if was is not State.CONNECTING and not isinstance(error, TimeoutError):
            member.failed = True
        if isinstance(error, ssl.SSLError) and "ALERT" in (error.reason or "") and not self._later:
            self._transport.listener.denied(member.peer.rank)
        link.retry()

    def close(self) -> None:
        """Closes all unauthenticated connections and the listening socket."""
        self._closes = True
        for connection in tuple(self.early):
            connection.end(None)
        if self.door is not None:
            self._loop.watch(self.door.fileno())
            self.door.close()
