"""How workers tell the process that started them of their events: datagrams of JSON on a socket of its own."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from pathlib import Path

from farflung.errors import RunLost
from farflung.telemetry import Event, Sink

__all__ = ["EVENTS", "listener", "teller"]

EVENTS = "FARFLUNG_EVENTS"
"""Names the datagram socket on which whoever started the workers listens to them."""

LISTEN_S = 0.05
TELL_S = 60.0
"""How long whoever listens may leave a full socket unread."""


@contextlib.contextmanager
def listener(scratch: Path) -> Iterator[socket.socket]:
    """The end that listens, named in a folder."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as events:
        events.bind(str(scratch / "events"))
        events.settimeout(LISTEN_S)
        yield events


def teller(address: str) -> Sink:
    """The end that tells; whoever does not listen for a minute counts as gone."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    link.settimeout(TELL_S)
    link.connect(address)

    def tell(event: Event) -> None:
        try:
            link.send(json.dumps(event).encode())
        except OSError as error:
            raise RunLost(f"the command that started this worker is gone ({error})") from None

    return tell
