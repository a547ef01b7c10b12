"""Probes of the connection to another machine, which runs ``farflung doctor --serve``.

A request is JSON after its length, and so is its reply. ``hello`` asks for version and clock. With a port, the
other machine also connects back, only to the host that asks.
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
from typing import Any, NoReturn

from farflung import __version__
from farflung.comm.visits import LENGTH, receive_exactly
from farflung.types import Json

__all__ = ["ProbeResult", "create_listener", "handle_requests", "probe", "serve_probes"]

TIMEOUT_S = 5.0
"""Time limit of a reply or a connection."""
NUM_PINGS, MAX_REQUESTS, MAX_CONNECTIONS = 8, 16, 32
"""Number of round trips, of requests allowed on a connection, and of simultaneous connections."""
MAX_NBYTES = 1 << 10
"""Maximum length of a request or a reply."""
PARSE_ERRORS = (ArithmeticError, KeyError, RecursionError, TypeError, ValueError)
"""Errors raised when a malformed message is read."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Properties of the connection to another machine.

    Args:
      version: Version of farflung on the other machine.
      connect_back_error: Reason why the other machine could not connect back; empty if it could.
      round_trip_s: Shortest round trip of several.
      clock_s: Offset of its clock from this one's, accurate to half a round trip.
    """

    version: str
    connect_back_error: str
    round_trip_s: float
    clock_s: float


def create_listener(port: int = 0) -> socket.socket:
    """Listens on all addresses of this machine, including those of IPv6.

    Raises:
      OSError: The port is taken.
    """
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", port))


def serve_probes(listener: socket.socket) -> NoReturn:
    """Answers probes, each connection on its own thread, until an exception such as ``KeyboardInterrupt``."""
    slots = BoundedSemaphore(MAX_CONNECTIONS)

    def handle_and_release(sock: socket.socket) -> None:
        try:
            handle_requests(sock)
        finally:
            slots.release()

    while True:
        slots.acquire()
        sock, _ = listener.accept()
        Thread(target=handle_and_release, args=(sock,), daemon=True).start()


def handle_requests(sock: socket.socket) -> None:
    """Handles the requests of one connection until it ends, times out, or sends an invalid request."""
    with sock, suppress(OSError, *PARSE_ERRORS):
        for _ in range(MAX_REQUESTS):
            request = _receive_message(sock)
            if request["ask"] != "hello":
                return
            reason = None
            if "port" in request:
                reason = _try_connect_back(sock, int(request["port"]), int(request["token"]))
            _send_message(sock, {"version": __version__, "time_s": time.time(), "back": reason or ""})


def probe(address: tuple[str, int], *, port: int = 0) -> ProbeResult:
    """Checks the connection to a machine that runs ``farflung doctor --serve``.

    Args:
      address: Host and port of the machine.
      port: Port on which this machine listens for the connection back; 0 for any free port.

    Raises:
      OSError: The machine cannot be reached, or is not a doctor; says why.
    """
    token, shortest_s, clock_s = time.monotonic_ns() % (1 << 53), math.inf, 0.0
    with create_listener(port) as back, _connect(address) as sock:
        _send_message(sock, {"ask": "hello", "port": back.getsockname()[1], "token": token})
        reply = _receive_message(sock)
        version, reason = (
            "".join(filter(str.isprintable, str(reply[name])))[:200] for name in ("version", "back")
        )
        if not reason:
            back.settimeout(TIMEOUT_S)
            with back.accept()[0] as incoming:
                reason = "" if _receive_message(incoming) == {"token": token} else "something else connected"
        for _ in range(NUM_PINGS):
            sent_s, begin = time.time(), time.monotonic()
            _send_message(sock, {"ask": "hello"})
            remote_s, round_trip_s = float(_receive_message(sock)["time_s"]), time.monotonic() - begin
            if round_trip_s < shortest_s:
                shortest_s, clock_s = round_trip_s, remote_s - sent_s - round_trip_s / 2
    return ProbeResult(version, reason, shortest_s, clock_s)


@contextmanager
def _connect(address: tuple[str, int]) -> Iterator[socket.socket]:
    """Connects to an address; raises ``OSError`` if a reply is malformed."""
    with socket.create_connection(address, timeout=TIMEOUT_S) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            yield sock
        except PARSE_ERRORS:
            raise ConnectionError("what answers there is not farflung doctor --serve") from None


def _send_message(sock: socket.socket, message: Mapping[str, Json]) -> None:
    text = json.dumps(message).encode()
    sock.settimeout(TIMEOUT_S)
    sock.sendall(LENGTH.pack(len(text)) + text)


def _receive_message(sock: socket.socket) -> Any:
    deadline = time.monotonic() + TIMEOUT_S
    (nbytes,) = LENGTH.unpack(receive_exactly(sock, LENGTH.size, deadline))
    if nbytes > MAX_NBYTES:
        raise ValueError("too long")
    return json.loads(receive_exactly(sock, nbytes, deadline))


def _try_connect_back(sock: socket.socket, port: int, token: int) -> str | None:
    """Connects to the host at the other end of a connection; returns the error's text, or None if it succeeded."""
    try:
        with socket.create_connection((sock.getpeername()[0], port), timeout=TIMEOUT_S / 2) as outgoing:
            _send_message(outgoing, {"token": token})
    except OSError as error:
        return error.strerror or str(error)
    return None
