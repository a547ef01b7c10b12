"""Probes of the connection to another machine, which runs ``farflung doctor --serve``.

A request is JSON after its length, and so is its reply. ``hello`` asks for version and clock. With a port, the
other machine also connects back, only to the host that asks. After ``take``, the asking side sends bytes until
it closes its end; after ``give``, the other machine does.
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
"""Time limit of a reply or a connection."""
SENT_S, MOST_S = 1.0, 2.0
"""Duration of sending in one direction, and its limit when another machine requests it."""
PINGS, QUESTIONS, AT_ONCE = 8, 16, 32
"""Number of round trips, of requests allowed on a connection, and of simultaneous connections."""
MOST_NBYTES = 1 << 10
"""Maximum length of a request or a reply."""
MALFORMED = (ArithmeticError, KeyError, RecursionError, TypeError, ValueError)
"""Errors raised when a malformed message is read."""


@dataclass(frozen=True, slots=True)
class Probed:
    """Properties of the connection to another machine.

    Args:
      version: Version of farflung on the other machine.
      back: Reason why the other machine could not connect back; empty if it could.
      round_trip_s: Shortest round trip of several.
      there_bps: Bits a second to the other machine.
      here_bps: Bits a second from it.
      clock_s: Offset of its clock from this one's, accurate to half a round trip.
    """

    version: str
    back: str
    round_trip_s: float
    there_bps: float
    here_bps: float
    clock_s: float


def listening(port: int = 0) -> socket.socket:
    """Listens on all addresses of this machine, including those of IPv6.

    Raises:
      OSError: The port is taken.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def serve(listener: socket.socket) -> None:
    """Answers probes until it is interrupted, each connection on its own thread."""
    slots = BoundedSemaphore(AT_ONCE)

    def handle_and_release(sock: socket.socket) -> None:
        try:
            answer(sock)
        finally:
            slots.release()

    while True:
        slots.acquire()
        sock, _ = listener.accept()
        Thread(target=handle_and_release, args=(sock,), daemon=True).start()


def answer(link: socket.socket) -> None:
    """Handles the requests of one connection until it ends, times out, or sends an invalid request."""
    with link, suppress(OSError, *MALFORMED):
        for _ in range(QUESTIONS):
            request = _hear(link)
            if request["ask"] == "hello":
                reason = _back(link, int(request["port"]), int(request["token"])) if "port" in request else ""
                _say(link, {"version": __version__, "time_s": time.time(), "back": reason})
                continue
            if request["ask"] == "take":
                _say(link, {"bps": _drained(link)})
            elif request["ask"] == "give":
                _flood(link, float(request["for_s"]))
            return


def probe(address: tuple[str, int], *, port: int = 0) -> Probed:
    """Measures the connection to a machine that runs ``farflung doctor --serve``.

    Args:
      address: Host and port of the machine.
      port: Port on which this machine listens for the connection back; 0 for any free port.

    Raises:
      OSError: The machine cannot be reached, or is not a doctor; says why.
    """
    token, shortest_s, clock_s = time.monotonic_ns() % (1 << 53), math.inf, 0.0
    with listening(port) as back, _asking(address) as sock:
        _say(sock, {"ask": "hello", "port": back.getsockname()[1], "token": token})
        reply = _hear(sock)
        version, reason = (
            "".join(filter(str.isprintable, str(reply[name])))[:200] for name in ("version", "back")
        )
        if not reason:
            back.settimeout(PATIENCE_S)
            with back.accept()[0] as incoming:
                reason = "" if _hear(incoming) == {"token": token} else "something else connected"
        for _ in range(PINGS):
            sent_s, begin = time.time(), time.monotonic()
            _say(sock, {"ask": "hello"})
            remote_s, round_trip_s = float(_hear(sock)["time_s"]), time.monotonic() - begin
            if round_trip_s < shortest_s:
                shortest_s, clock_s = round_trip_s, remote_s - sent_s - round_trip_s / 2
    with _asking(address) as sock:
        _say(sock, {"ask": "take"})
        _flood(sock, SENT_S)
        upload_bps = float(_hear(sock)["bps"])
    with _asking(address) as sock:
        _say(sock, {"ask": "give", "for_s": SENT_S})
        return Probed(version, reason, shortest_s, upload_bps, _drained(sock), clock_s)


@contextmanager
def _asking(address: tuple[str, int]) -> Iterator[socket.socket]:
    """Connects to an address; raises ``OSError`` if a reply is malformed."""
    with socket.create_connection(address, timeout=PATIENCE_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            yield sock
        except MALFORMED:
            raise ConnectionError("what answers there is not farflung doctor --serve") from None


def _say(link: socket.socket, said: Mapping[str, Json]) -> None:
    text = json.dumps(said).encode()
    link.settimeout(PATIENCE_S)
    link.sendall(LENGTH.pack(len(text)) + text)


def _hear(link: socket.socket) -> Any:
    deadline = time.monotonic() + PATIENCE_S + MOST_S
    (nbytes,) = LENGTH.unpack(exactly(link, LENGTH.size, deadline))
    if nbytes > MOST_NBYTES:
        raise ValueError("too long")
    return json.loads(exactly(link, nbytes, deadline))


def _back(link: socket.socket, port: int, token: int) -> str:
    """Connects to the host at the other end of a connection; returns why it failed, or an empty string."""
    try:
        with socket.create_connection((link.getpeername()[0], port), timeout=PATIENCE_S / 2) as outgoing:
            _say(outgoing, {"token": token})
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _flood(link: socket.socket, for_s: float) -> None:
    """Sends zeros for some seconds, then closes this end."""
    deadline, chunk = time.monotonic() + min(for_s, MOST_S), bytes(1 << 16)
    link.settimeout(PATIENCE_S)
    while time.monotonic() < deadline:
        link.sendall(chunk)
    link.shutdown(socket.SHUT_WR)


def _drained(link: socket.socket) -> float:
    """Receives bytes until the other end is closed; returns bits a second."""
    nbytes, begin = 0, time.monotonic()
    link.settimeout(PATIENCE_S)
    while chunk := link.recv(1 << 18):
        nbytes += len(chunk)
        if time.monotonic() - begin > MOST_S + PATIENCE_S:
            raise TimeoutError("it does not end")
    return 8 * nbytes / max(1e-9, time.monotonic() - begin)
