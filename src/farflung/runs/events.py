"""How workers tell the process that started them of their events: datagrams of JSON on a socket of its own."""

from __future__ import annotations

import contextlib
import json
import socket
from collections import Counter, deque
from collections.abc import Iterator
from pathlib import Path
from threading import Condition, Thread
from types import TracebackType
from typing import Self

from farflung.errors import RunLost
from farflung.telemetry import Event, Sink

__all__ = ["EVENTS", "Buffered", "listener", "teller"]

EVENTS = "FARFLUNG_EVENTS"
"""Names the datagram socket on which the process that started the workers listens to them."""

LISTEN_S = 0.05
BUFFERED = 1024
"""Events that may wait for a sink before those of further steps are dropped."""


@contextlib.contextmanager
def listener(scratch: Path) -> Iterator[socket.socket]:
    """The end that listens, named in a folder."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as events:
        events.bind(str(scratch / "events"))
        events.settimeout(LISTEN_S)
        yield events


def teller(address: str) -> Sink:
    """Makes the end that tells, which waits while the socket is full."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    link.connect(address)

    def tell(event: Event) -> None:
        try:
            link.send(json.dumps(event).encode())
        except OSError as error:
            raise RunLost(f"the command that started this worker is gone ({error})") from None

    return tell


class Buffered:
    """A sink that hands events on to another, on a thread of its own, so that a slow sink does not hold up the run.

    While too many events wait, those of further steps are dropped; an event ``dropped`` says how many of a rank were.
    It is a context manager, which hands on what waits before it ends; after an error it leaves out the events of steps.

    Args:
      sink: takes the events; an error of it is raised at the next event, or at the end.
    """

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._changed = Condition()
        self._waiting: deque[Event] = deque()
        self._dropped: Counter[int] = Counter()
        self._error: BaseException | None = None
        self._closed = False
        self._thread = Thread(target=self._hand_on, name="farflung-events", daemon=True)

    def __call__(self, event: Event) -> None:
        with self._changed:
            if self._error is not None:
                raise self._error
            if event["event"] == "step" and len(self._waiting) >= BUFFERED:
                self._dropped[int(str(event["rank"]))] += 1
                return
            self._tell_dropped()
            self._waiting.append(event)
            self._changed.notify()

    def _tell_dropped(self) -> None:
        for rank, count in self._dropped.items():
            self._waiting.append({"event": "dropped", "rank": rank, "count": count})
        self._dropped.clear()

    def _hand_on(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting or self._closed)
                    if not self._waiting:
                        return
                    event = self._waiting.popleft()
                self._sink(event)
        except BaseException as error:
            with self._changed:
                self._error = error

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._changed:
            self._tell_dropped()
            if error is not None:
                self._waiting = deque(event for event in self._waiting if event["event"] != "step")
            self._closed = True
            self._changed.notify()
        self._thread.join()
        if error is None and self._error is not None:
            raise self._error
