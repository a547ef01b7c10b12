"""Transfer of workers' events to the process that started them, as JSON datagrams on a socket."""

from __future__ import annotations

import contextlib
import json
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from threading import Lock, Thread
from types import TracebackType
from typing import Self

from farflung.errors import RunLost
from farflung.telemetry import Event, Sink

__all__ = ["EVENTS", "Buffered", "listener", "teller"]

EVENTS = "FARFLUNG_EVENTS"
"""Environment variable with the path of the datagram socket for events."""

LISTEN_S = 0.05
BUFFERED = 1024
"""Number of queued events at which events of further steps are dropped."""


@contextlib.contextmanager
def listener(scratch: Path) -> Iterator[socket.socket]:
    """Creates the socket that receives events, in a folder, for the duration of the context."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as events:
        events.bind(str(scratch / "events"))
        events.settimeout(LISTEN_S)
        yield events


def teller(address: str) -> Sink:
    """Creates a sink that sends events to a socket, and blocks while the socket is full."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    connection.connect(address)

    def send_event(event: Event) -> None:
        try:
            connection.send(json.dumps(event).encode())
        except OSError as error:
            raise RunLost(f"the command that started this worker is gone ({error})") from None

    return send_event


class Buffered:
    """Sink that forwards events to another one on a separate thread, so that a slow sink does not delay the run.

    If too many events are queued, step events are dropped, and an event ``dropped`` counts them for each rank. The
    context manager forwards queued events before it ends, after an error without step events.

    Args:
      sink: Sink that receives the events; its errors are raised at the next event, or at the end.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink, self._lock = sink, Lock()
        self._waiting: SimpleQueue[Event | None] = SimpleQueue()
        self._dropped: Counter[int] = Counter()
        self._error: BaseException | None = None
        self._leaves_steps_out = False
        self._thread = Thread(target=self._hand_on, name="farflung-events", daemon=True)

    def __call__(self, event: Event) -> None:
        if self._error is not None:
            raise self._error
        with self._lock:
            if event["event"] == "step" and self._waiting.qsize() >= BUFFERED:
                self._dropped[int(str(event["rank"]))] += 1
            else:
                self._put(event)

    def _put(self, event: Event | None) -> None:
        """Queues an event after the counts of dropped ones; None ends the thread."""
        for rank, count in self._dropped.items():
            self._waiting.put({"event": "dropped", "rank": rank, "count": count})
        self._dropped.clear()
        self._waiting.put(event)

    def _hand_on(self) -> None:
        try:
            while (event := self._waiting.get()) is not None:
                if not (self._leaves_steps_out and event["event"] == "step"):
                    self._sink(event)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaves_steps_out = error is not None
        self._put(None)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error
