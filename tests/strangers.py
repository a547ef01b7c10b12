"""Those who knock at a replica's door and do not belong there."""

from __future__ import annotations

import hmac
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import zmq

from farflung.comm import Peer, WallCommunicator
from farflung.comm.keys import Keys
from farflung.comm.wire import DIRECT, Kind, Route, encode
from farflung.types import Payload
from tests.helpers import PATIENCE_S, numbered, tag

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
CURVE_GREETING = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
PLAIN_GREETING = GREETING + b"PLAIN".ljust(20, b"\0") + bytes(32)
NOISE = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "the protocol of before there was encryption": b"\x01\x00",
    "a mechanism that is none": GREETING + b"WHAT".ljust(20, b"\0") + bytes(32),
    "no mechanism": GREETING + b"NULL".ljust(20, b"\0") + bytes(32),
    "a frame larger than any memory": CURVE_GREETING + b"\x06" + struct.pack(">Q", 1 << 62),
    "the same to who does not encrypt": PLAIN_GREETING + b"\x06" + struct.pack(">Q", 1 << 62),
    "a password that ends early": PLAIN_GREETING + b"\x04\x08" + b"\x05HELLO\xff0",
    "a handshake of zeros": CURVE_GREETING + b"\x04\xc8" + b"\x05HELLO" + bytes(194),
    "a message instead of a handshake": CURVE_GREETING + b"\x00\x05HELLO",
    "a message without a password": PLAIN_GREETING + b"\x00\x05HELLO",
}


FRAME = b"\x03" + struct.pack(">Q", 1 << 20) + bytes(1 << 20)
"""One of 1 MiB, with more to follow."""


def knock(comm: WallCommunicator) -> socket.socket:
    host, _, port = comm.view.transport.me.where.removeprefix("tcp://").rpartition(":")
    less_than_zeromqs_own = PATIENCE_S / 3
    return socket.create_connection((host, int(port)), timeout=less_than_zeromqs_own)


def until_closed(link: socket.socket) -> None:
    with suppress(ConnectionError):
        while link.recv(1 << 16):
            pass


@contextmanager
def dealing() -> Iterator[zmq.Socket[bytes]]:
    """A socket of somebody else."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as one:
        one.linger = 0
        yield one


def with_keys(dealer: zmq.Socket[bytes], keys: Keys, server: str) -> None:
    dealer.setsockopt(zmq.CURVE_PUBLICKEY, keys.public.encode())
    dealer.setsockopt(zmq.CURVE_SECRETKEY, keys.secret.encode())
    dealer.setsockopt(zmq.CURVE_SERVERKEY, server.encode())


def with_password(dealer: zmq.Socket[bytes], of: Peer, to: Peer) -> None:
    dealer.setsockopt(zmq.PLAIN_USERNAME, str(of.rank).encode())
    dealer.setsockopt(zmq.PLAIN_PASSWORD, hmac.digest(to.token, of.token, "sha256").hex().encode())


FORGED = tag(99)


def forged(route: Route = DIRECT) -> list[bytes]:
    return [bytes(frame) for frame in encode(Kind.DATA, 0, FORGED, numbered(666), route=route)]


def abort() -> list[bytes]:
    text = torch.frombuffer(bytearray(b'{"rank": 1, "detail": "gone"}'), dtype=torch.uint8)
    return [bytes(frame) for frame in encode(Kind.ABORT, 0, tag(0), Payload((text,)))]


def greeting(rank: int) -> list[bytes]:
    text = torch.frombuffer(
        bytearray(b'{"rank": %d, "settings": {"number of replicas": 3}}' % rank), dtype=torch.uint8
    )
    return [bytes(frame) for frame in encode(Kind.HELLO, 0, tag(0), Payload((text,)))]
