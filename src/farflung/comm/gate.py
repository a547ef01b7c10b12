"""Who gets in: every connection proves whom it is from before anything of its owner's passes.

Encrypted connections prove a key by ZeroMQ's CURVE. On loopback, where nothing has to be encrypted, a connection proves
by PLAIN that it knows what the run's store told the replicas alone. Either way the listener is asked (ZAP, ZeroMQ RFC
27), in the poll loop of the socket's own thread, and ZeroMQ keeps nothing that comes over a connection before.
"""

from __future__ import annotations

import hmac
from collections import deque
from collections.abc import Iterable

import zmq
from zmq.utils import z85

from farflung.comm.keys import Keys
from farflung.comm.peer import Peer

__all__ = ["Gate"]

_ZAP = "inproc://zeromq.zap.01"
_ACCEPTED, _DENIED = (b"200", b"accepted"), (b"400", b"not of this run")
_KEPT = 256
"""Questions about who is not on the list yet; of more the oldest stay without an answer."""


class Gate:
    """Lets in those on a list, and names them.

    Args:
      context: of the socket to guard, and of no other.
      token: of the replica whose socket it is.
      keys: what it proves itself with where it encrypts; ``None``: it does not.
      later: whether the list grows, so that who is not on it waits until it is; otherwise it is told that it is not.
    """

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], token: bytes, keys: Keys | None, *, later: bool = False
    ) -> None:
        self.keys = keys
        self._later = later
        self._token = token
        self._admitted: dict[int, tuple[str, bytes]] = {}
        """By rank: the name of who may come, and its password."""
        self._early: deque[list[bytes]] = deque(maxlen=_KEPT)
        """Questions about those who have knocked before they were on the list. ZeroMQ ends a handshake that takes too
        long, and they knock again; after a refusal for now it would let them wait as long too."""
        self.questions = context.socket(zmq.ROUTER)
        """Readable when somebody waits for an answer; until :meth:`answer` is called the handshake waits too."""
        self.questions.bind(_ZAP)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Prepares a socket; call it before it listens."""
        socket.setsockopt(zmq.ZAP_DOMAIN, b"farflung")
        socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # nobody gets in unasked
        if self.keys is None:
            socket.setsockopt(zmq.PLAIN_SERVER, 1)
            return
        _give(socket, self.keys)
        socket.setsockopt(zmq.CURVE_SERVER, 1)

    def approach(self, socket: zmq.Socket[bytes], rank: int, peer: Peer) -> None:
        """Makes the next connection of ``socket`` one of this replica, ``rank``, to ``peer``."""
        if self.keys is not None and peer.key is not None:
            _give(socket, self.keys)
            socket.setsockopt(zmq.CURVE_SERVERKEY, peer.key.encode())
            return
        socket.setsockopt(zmq.PLAIN_USERNAME, str(rank).encode())
        socket.setsockopt(zmq.PLAIN_PASSWORD, _password(self._token, peer.token))

    def admit(self, peers: Iterable[Peer]) -> None:
        """Puts some on the list, and answers those of them who wait for it."""
        for peer in peers:
            self._admitted[peer.rank] = self.name_of(peer), _password(peer.token, self._token)
        for _ in range(len(self._early)):
            self._answer(self._early.popleft())

    def dismiss(self, rank: int) -> None:
        """Takes one off the list; a connection that is there stays."""
        self._admitted.pop(rank, None)

    @staticmethod
    def name_of(peer: Peer) -> str:
        """The ``User-Id`` of what comes over a connection that ``peer`` has made."""
        return str(peer.rank) if peer.key is None else peer.key

    @staticmethod
    def named(frame: zmq.Frame) -> str | None:
        """The name of whoever sent ``frame``; ``None`` where it came over a connection that we made."""
        try:
            return str(frame.get("User-Id"))
        except zmq.ZMQError:
            return None

    def answer(self) -> None:
        """Answers all questions there are."""
        while True:
            try:
                self._answer(self.questions.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return

    def _answer(self, question: list[bytes]) -> None:
        route, empty, version, request, *details = question
        name = self._name(*details[3:])
        if name is None and self._later:
            self._early.append(question)
            return
        code, text = _DENIED if name is None else _ACCEPTED
        self.questions.send_multipart(
            [route, empty, version, request, code, text, (name or "").encode(), b""]
        )

    def close(self) -> None:
        """Closes the gate: from here on nobody gets in."""
        self.questions.close(linger=0)

    def _name(self, mechanism: bytes, *credentials: bytes) -> str | None:
        """Who proves to be on the list; ZeroMQ asks with no mechanism but the one that guards the socket."""
        admitted = dict(self._admitted.values())
        if mechanism == b"CURVE":
            key = z85.encode(credentials[0]).decode()
            return key if key in admitted else None
        name = credentials[0].decode(errors="replace")
        return name if hmac.compare_digest(credentials[1], admitted.get(name, b"")) else None


def _give(socket: zmq.Socket[bytes], keys: Keys) -> None:
    """What it proves itself with from now on."""
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())


def _password(of: bytes, to: bytes) -> bytes:
    """Proves to the replica with one token that who connects has the other; of no use with any third one."""
    return hmac.digest(to, of, "sha256").hex().encode()
