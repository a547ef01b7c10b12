"""Those who knock at a replica's door and do not belong there."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch
import zmq

from farflung.comm import ZmqCommunicator
from farflung.comm.keys import Keys
from farflung.comm.wire import Kind, encode
from farflung.types import Payload
from tests.helpers import PATIENCE_S, tag

GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00"
CURVE_GREETING = GREETING + b"CURVE".ljust(20, b"\0") + bytes(32)
NOISE = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "the protocol of before there was encryption": b"\x01\x00",
    "a mechanism that is none": GREETING + b"WHAT".ljust(20, b"\0") + bytes(32),
    "a frame larger than any memory": CURVE_GREETING + b"\x06" + struct.pack(">Q", 1 << 62),
    "a handshake of zeros": CURVE_GREETING + b"\x04\xc8" + b"\x05HELLO" + bytes(194),
    "a message instead of a handshake": CURVE_GREETING + b"\x00\x05HELLO",
}


def knock(comm: ZmqCommunicator) -> socket.socket:
    host, _, port = comm.me.address.removeprefix("tcp://").rpartition(":")
    less_than_zeromqs_own = PATIENCE_S / 3
    return socket.create_connection((host, int(port)), timeout=less_than_zeromqs_own)


def until_closed(link: socket.socket) -> None:
    with suppress(ConnectionResetError):
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


def abort() -> list[bytes]:
    text = torch.frombuffer(bytearray(b'{"rank": 1, "detail": "gone"}'), dtype=torch.uint8)
    return [bytes(frame) for frame in encode(Kind.ABORT, 0, tag(0), Payload((text,)))]


def greeting(rank: int) -> list[bytes]:
    text = torch.frombuffer(
        bytearray(b'{"rank": %d, "settings": {"number of replicas": 3}}' % rank), dtype=torch.uint8
    )
    return [bytes(frame) for frame in encode(Kind.HELLO, 0, tag(0), Payload((text,)))]
