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

__all__ = ["EVENTS_VARIABLE", "BufferedSink", "connect_event_sink", "listen_for_events"]

EVENTS_VARIABLE = "FARFLUNG_EVENTS"
"""Environment variable with the path of the datagram socket for events."""

LISTEN_S = 0.05
MAX_BUFFERED = 1024
"""Number of queued events at which events of further steps are dropped."""


@contextlib.contextmanager
def listen_for_events(scratch: Path) -> Iterator[socket.socket]:
    """Creates the socket that receives events, in a folder, for the duration of the context."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as events:
        events.bind(str(scratch / "events"))
        events.settimeout(LISTEN_S)
        yield events


def connect_event_sink(address: str) -> Sink:
    """Creates a sink that sends events to a socket, and blocks while the socket is full."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    connection.connect(address)

    def send_event(event: Event) -> None:
        try:
            connection.send(json.dumps(event).encode())
        except OSError as error:
            raise RunLost(f"the command that started this worker is gone ({error})") from None

    return send_event


class BufferedSink:
    """Sink that forwards events to another one on a separate thread, so that a slow sink does not delay the run.

    If too many events are queued, step events are dropped, and an event ``dropped`` counts them for each rank. The
    context manager forwards queued events before it ends, after an error without step events.

    Args:
      sink: Sink that receives the events; its errors are raised at the next event, or at the end.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink, self._lock = sink, Lock()
        self._queue: SimpleQueue[Event | None] = SimpleQueue()
        self._dropped_counts: Counter[int] = Counter()
        self._error: BaseException | None = None
        self._should_skip_steps = False
        self._thread = Thread(target=self._forward_events, name="farflung-events", daemon=True)

    def __call__(self, event: Event) -> None:
        if self._error is not None:
            raise self._error
        with self._lock:
            if event["event"] == "step" and self._queue.qsize() >= MAX_BUFFERED:
                self._dropped_counts[int(str(event["rank"]))] += 1
            else:
                self._enqueue(event)

    def _enqueue(self, event: Event | None) -> None:
        """Queues an event after the counts of dropped ones; None ends the thread."""
        for rank, count in self._dropped_counts.items():
            self._queue.put({"event": "dropped", "rank": rank, "count": count})
        self._dropped_counts.clear()
        self._queue.put(event)

    def _forward_events(self) -> None:
        try:
            while (event := self._queue.get()) is not None:
                if not (self._should_skip_steps and event["event"] == "step"):
                    self._sink(event)
        except BaseException as error:
            self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._should_skip_steps = error is not None
        self._enqueue(None)
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error
