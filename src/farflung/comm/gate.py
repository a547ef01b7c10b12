"""Encryption and authentication of one socket by ZeroMQ's CURVE.

Who connects knows the key of whom it connects to, and a listener is asked about each key before anything of its
owner's gets in (ZAP, ZeroMQ RFC 27). The questions are answered in the poll loop of the socket's own thread.
"""

from __future__ import annotations

from collections.abc import Iterable

import zmq
from zmq.utils import z85

from farflung.comm.interface import is_loopback, tcp
from farflung.comm.keys import Keys
from farflung.errors import ConfigError

__all__ = ["HANDSHAKE_S", "Gate", "listen"]

HANDSHAKE_S = 10.0
"""How long anybody may take from connecting to having proved a key."""
_ZAP = "inproc://zeromq.zap.01"
_ACCEPTED, _DENIED = (b"200", b"accepted"), (b"400", b"not a key of this run")


class Gate:
    """Lets in whoever holds one of the keys on a list.

    Args:
      context: of the socket to guard, and of no other.
      keys: what this replica proves itself with.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys) -> None:
        self.keys = keys
        self._admitted: frozenset[str] = frozenset()
        self.questions = context.socket(zmq.ROUTER)
        """Readable when a key waits for an answer; until :meth:`answer` is called its handshake waits too."""
        self.questions.bind(_ZAP)

    def guard(self, socket: zmq.Socket[bytes]) -> None:
        """Prepares a socket; call it before it listens."""
        for option, value in (
            (zmq.CURVE_PUBLICKEY, self.keys.public.encode()),
            (zmq.CURVE_SECRETKEY, self.keys.secret.encode()),
            (zmq.CURVE_SERVER, 1),
            (zmq.ZAP_DOMAIN, b"farflung"),
            (zmq.ZAP_ENFORCE_DOMAIN, 1),  # nobody gets in unasked
        ):
            socket.setsockopt(option, value)

    def approach(self, socket: zmq.Socket[bytes], key: str) -> None:
        """Makes the next connection of ``socket`` one to the owner of ``key`` and to nobody else."""
        socket.setsockopt(zmq.CURVE_SERVERKEY, key.encode())

    def admit(self, keys: Iterable[str]) -> None:
        """Sets the list."""
        self._admitted = frozenset(keys)

    def answer(self) -> None:
        """Answers all questions there are; the key becomes the ``User-Id`` of what comes over the connection."""
        while True:
            try:
                route, empty, version, request, *details = self.questions.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            *_, mechanism, credentials = details
            key = z85.encode(credentials) if mechanism == b"CURVE" else b""
            code, text = _ACCEPTED if key.decode() in self._admitted else _DENIED
            self.questions.send_multipart([route, empty, version, request, code, text, key, b""])

    @staticmethod
    def key_of(frame: zmq.Frame) -> str | None:
        """The key of whoever sent ``frame``; ``None`` where it came over a connection that we made."""
        try:
            return str(frame.get("User-Id"))
        except zmq.ZMQError:
            return None

    def close(self) -> None:
        """Closes the gate: from here on nobody gets in."""
        self.questions.close(linger=0)


def listen(socket: zmq.Socket[bytes], interface: str, gate: Gate | None) -> str:
    """Binds a socket to a port that is free there; returns the address to connect to.

    Args:
      socket: of a replica.
      interface: an address of this machine; without a gate one of loopback.
      gate: who is asked about each key.

    Raises:
      ConfigError: the address is none of this machine's, or not loopback and there is no gate.
    """
    local = is_loopback(interface)
    if gate is None and not local:
        raise ConfigError(
            f"interface {interface}: nothing leaves this machine without encryption, which takes keys"
        )
    if gate is not None:
        gate.guard(socket)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(HANDSHAKE_S * 1000))
    socket.setsockopt(zmq.IPV6, ":" in interface)
    try:
        port = socket.bind_to_random_port(tcp(interface))
    except zmq.ZMQError as error:
        raise ConfigError(f"interface {interface}: cannot listen there ({error.strerror})") from None
    return f"{tcp(interface)}:{port}"
