"""Those that connect to a replica and do not belong there."""

from __future__ import annotations

import hmac
import secrets
import socket
import ssl
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from farflung.comm import Peer, WallCommunicator, loop
from farflung.comm.keys import Keys, build_tls_context
from farflung.comm.records import RecordKind
from farflung.comm.wire import DIRECT_ROUTE, MAGIC, VERSION, MessageKind, RelayRoute, encode
from farflung.types import Payload
from tests.helpers import PATIENCE_S, numbered, tag

CHALLENGE_NBYTES, PROOF_NBYTES = 20, 32
HELLO = struct.Struct("<IB3x16s32s")
CLIENT_HELLO = b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"
NOISE = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "what came before TLS": b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32),
    "an introduction of zeros": bytes(HELLO.size),
    "an introduction of ones": b"\xff" * HELLO.size,
    "TLS that ends early": CLIENT_HELLO,
    "TLS with nonsense in it": CLIENT_HELLO + secrets.token_bytes(600),
    "a record before an introduction": struct.pack("<IB3x", 1 << 20, RecordKind.HEAD) + bytes(1000),
}
FRAME = struct.pack("<IB3x", 1 << 20, RecordKind.HEAD) + bytes(1 << 20)
"""One of 1 MiB, with more to follow."""


def place(comm: WallCommunicator) -> tuple[str, int]:
    return comm.session.transport.local_peer.host_and_port


def knock(comm: WallCommunicator) -> socket.socket:
    return socket.create_connection(place(comm), timeout=PATIENCE_S / 3)


class Clock:
    """The time of connections, set by hand: while it stands still, nothing ends by a deadline."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 0.0
        monkeypatch.setattr(loop, "time", self)

    def monotonic(self) -> float:
        return self.now_s


@contextmanager
def may_be_closed() -> Iterator[None]:
    """Inside, the other end may close the connection; one that only falls silent is an error."""
    try:
        yield
    except TimeoutError:
        raise
    except OSError:
        pass


def until_closed(link: socket.socket) -> None:
    with may_be_closed():
        while link.recv(1 << 16):
            pass


def exactly(link: socket.socket, nbytes: int) -> bytes:
    said = b""
    while len(said) < nbytes:
        part = link.recv(nbytes - len(said))
        if not part:
            raise ConnectionResetError("closed")
        said += part
    return said


def proof(nonce: bytes, of: bytes, to: bytes, *said: int) -> bytes:
    return hmac.digest(to, nonce + of + struct.pack(f"<{len(said)}I", *said), "sha256")


def sealed(link: socket.socket, keys: Keys, server: str) -> ssl.SSLSocket:
    """The same connection with TLS, by someone's keys; ``server`` is the certificate that is accepted."""
    return build_tls_context(keys, [server], is_server=False).wrap_socket(link)


def challenged(link: socket.socket) -> bytes:
    """The nonce of the other end."""
    magic, version, nonce = struct.unpack("<2sBx16s", exactly(link, CHALLENGE_NBYTES))
    assert (magic, version) == (MAGIC, VERSION)
    return bytes(nonce)


def introduced(link: socket.socket, of: Peer, to: Peer, index: int = 0, *, rank: int | None = None) -> bool:
    """Introduces a connection as a member would that has these tokens; whether it was let in."""
    rank = of.rank if rank is None else rank
    nonce = challenged(link)
    link.sendall(HELLO.pack(rank, index, bytes(range(16)), proof(nonce, of.token, to.token, rank, index)))
    with may_be_closed():
        return exactly(link, PROOF_NBYTES) == proof(bytes(range(16)), to.token, of.token)
    return False


def patiently(let: Callable[[], object], work: Callable[[], object]) -> None:
    """Runs ``let``, a stranger's side, while ``work`` lets members work."""
    import threading

    thread = threading.Thread(target=let, daemon=True)
    thread.start()
    while thread.is_alive():
        work()
    thread.join()


FORGED = tag(99)


def message(frames: list[bytes]) -> bytes:
    """The records of a message whose tensors all ride in its head."""
    (head,) = frames
    return struct.pack("<IB3x", len(head), RecordKind.HEAD) + head


def forged(route: RelayRoute = DIRECT_ROUTE) -> list[bytes]:
    return [bytes(frame) for frame in encode(MessageKind.DATA, 0, FORGED, numbered(666), route=route)]


def abort() -> list[bytes]:
    text = torch.frombuffer(bytearray(b'{"rank": 1, "detail": "gone"}'), dtype=torch.uint8)
    return [bytes(frame) for frame in encode(MessageKind.ABORT, 0, tag(0), Payload((text,)))]


def greeting(rank: int) -> list[bytes]:
    text = torch.frombuffer(
        bytearray(b'{"rank": %d, "settings": {"number of replicas": 3}}' % rank), dtype=torch.uint8
    )
    return [bytes(frame) for frame in encode(MessageKind.HELLO, 0, tag(0), Payload((text,)))]
