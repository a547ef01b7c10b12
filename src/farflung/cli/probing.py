"""Probes: what the way to another machine is like, asked of ``farflung doctor --serve`` there.

A question is JSON after its length, and so is its answer. ``hello`` asks for version and clock, and with a port has the
other machine connect back, to the host that asks and to no other. After ``take`` bytes follow until that end is closed,
and after ``give`` they come from the other.
"""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import BoundedSemaphore, Thread
from typing import Any

from farflung import __version__
from farflung.comm.visits import LENGTH, exactly
from farflung.types import Json

__all__ = ["Probed", "answer", "listening", "probe", "serve"]

PATIENCE_S = 5.0
"""How long an answer, or a connection, may take."""
SENT_S, MOST_S = 1.0, 2.0
"""How long the bytes of one direction are sent, and at most where another asks for them."""
PINGS, QUESTIONS, AT_ONCE = 8, 16, 32
"""Round trips that are measured; questions that are answered on a connection; connections that are answered at once."""
MOST_NBYTES = 1 << 10
"""The longest question and answer."""
MALFORMED = (ArithmeticError, KeyError, RecursionError, TypeError, ValueError)
"""What reading it raises where it is not what it should be."""


@dataclass(frozen=True, slots=True)
class Probed:
    """What the way to another machine is like.

    Args:
      version: of farflung there.
      back: why the other machine could not connect back; empty where it could.
      round_trip_s: the shortest of some.
      there_bps: bits a second to the other machine.
      here_bps: bits a second from it.
      clock_s: how far its clock is ahead of this one's, to half a round trip.
    """

    version: str
    back: str
    round_trip_s: float
    there_bps: float
    here_bps: float
    clock_s: float


def listening(port: int = 0) -> socket.socket:
    """Listens on all addresses of this machine, those of IPv6 too where there are any.

    Raises:
      OSError: the port is taken.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def serve(listener: socket.socket) -> None:
    """Answers probes until it is interrupted, each connection on a thread of its own."""
    free = BoundedSemaphore(AT_ONCE)

    def answered(link: socket.socket) -> None:
        try:
            answer(link)
        finally:
            free.release()

    while True:
        free.acquire()
        link, _ = listener.accept()
        Thread(target=answered, args=(link,), daemon=True).start()


def answer(link: socket.socket) -> None:
    """Answers the questions of one connection, until it ends, is silent, or asks what is no question."""
    with link, suppress(OSError, *MALFORMED):
        for _ in range(QUESTIONS):
            asked = _hear(link)
            if asked["ask"] == "hello":
                back = _back(link, int(asked["port"]), int(asked["token"])) if "port" in asked else ""
                _say(link, {"version": __version__, "time_s": time.time(), "back": back})
                continue
            if asked["ask"] == "take":
                _say(link, {"bps": _drained(link)})
            elif asked["ask"] == "give":
                _flood(link, float(asked["for_s"]))
            return


def probe(address: tuple[str, int], *, port: int = 0) -> Probed:
    """Measures the way to a machine on which ``farflung doctor --serve`` runs.

    Args:
      address: its host and port.
      port: where this machine listens for the connection back; 0: any that is free.

    Raises:
      OSError: it is not reached, or does not answer as a doctor does; says why.
    """
    token, shortest, clock_s = time.monotonic_ns() % (1 << 53), math.inf, 0.0
    with listening(port) as back, _asking(address) as link:
        _say(link, {"ask": "hello", "port": back.getsockname()[1], "token": token})
        said = _hear(link)
        version, why = (
            "".join(filter(str.isprintable, str(said[name])))[:200] for name in ("version", "back")
        )
        if not why:
            back.settimeout(PATIENCE_S)
            with back.accept()[0] as came:
                why = "" if _hear(came) == {"token": token} else "something else connected"
        for _ in range(PINGS):
            before, begin = time.time(), time.monotonic()
            _say(link, {"ask": "hello"})
            there_s, taken_s = float(_hear(link)["time_s"]), time.monotonic() - begin
            if taken_s < shortest:
                shortest, clock_s = taken_s, there_s - before - taken_s / 2
    with _asking(address) as link:
        _say(link, {"ask": "take"})
        _flood(link, SENT_S)
        there_bps = float(_hear(link)["bps"])
    with _asking(address) as link:
        _say(link, {"ask": "give", "for_s": SENT_S})
        return Probed(version, why, shortest, there_bps, _drained(link), clock_s)


@contextmanager
def _asking(address: tuple[str, int]) -> Iterator[socket.socket]:
    """Connects; what is no answer is an ``OSError``."""
    with socket.create_connection(address, timeout=PATIENCE_S) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            yield link
        except MALFORMED:
            raise ConnectionError("what answers there is not farflung doctor --serve") from None


def _say(link: socket.socket, said: Mapping[str, Json]) -> None:
    text = json.dumps(said).encode()
    link.settimeout(PATIENCE_S)
    link.sendall(LENGTH.pack(len(text)) + text)


def _hear(link: socket.socket) -> Any:
    until = time.monotonic() + PATIENCE_S + MOST_S
    (nbytes,) = LENGTH.unpack(exactly(link, LENGTH.size, until))
    if nbytes > MOST_NBYTES:
        raise ValueError("too long")
    return json.loads(exactly(link, nbytes, until))


def _back(link: socket.socket, port: int, token: int) -> str:
    """Connects to the host at the other end of a connection, and to no other; returns why that failed, if it did."""
    try:
        with socket.create_connection((link.getpeername()[0], port), timeout=PATIENCE_S / 2) as back:
            _say(back, {"token": token})
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _flood(link: socket.socket, for_s: float) -> None:
    """Sends zeros for some seconds, and closes this end."""
    until, piece = time.monotonic() + min(for_s, MOST_S), bytes(1 << 16)
    link.settimeout(PATIENCE_S)
    while time.monotonic() < until:
        link.sendall(piece)
    link.shutdown(socket.SHUT_WR)


def _drained(link: socket.socket) -> float:
    """Takes bytes until the other end is closed: how many bits a second."""
    nbytes, begin = 0, time.monotonic()
    link.settimeout(PATIENCE_S)
    while part := link.recv(1 << 18):
        nbytes += len(part)
        if time.monotonic() - begin > MOST_S + PATIENCE_S:
            raise TimeoutError("it does not end")
    return 8 * nbytes / max(1e-9, time.monotonic() - begin)
