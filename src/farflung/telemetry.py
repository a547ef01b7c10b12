"""What a run says about itself while it goes on: events as JSON lines, alike in both worlds."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from farflung.errors import DataError
from farflung.files import JsonLinesFile, json_lines, writing
from farflung.types import Json

__all__ = ["BYTES", "TIMES", "Event", "JsonLines", "Sink", "Telemetry", "read_events"]

Event: TypeAlias = "dict[str, Json]"
"""One thing that happened: ``event`` names its kind, ``rank`` the replica, ``t`` the seconds on the run's clock."""
Sink: TypeAlias = "Callable[[Event], None]"
"""Where events go."""

TIMES = frozenset(
    {"compute_s", "data_s", "duration_s", "exposed_s", "held", "held_nbytes", "scoring_s", "t", "time_s"}
)
"""The fields of events that depend on the run's clock: seconds, and what a stream held by then; no others do."""
BYTES = frozenset({"bytes_sent", "bytes_sent_per_replica", "bytes_sent_to"})
"""The fields that hold bytes sent; where a collective is chosen by the network, so are they."""

_FLUSH_EVERY_S = 1.0


class Telemetry:
    """Hands each event of one replica to its sinks.

    Args:
      rank: the replica.
      sinks: where events go.
    """

    def __init__(self, rank: int, *sinks: Sink) -> None:
        self._rank, self._sinks = rank, sinks

    def emit(self, event: str, **fields: Json) -> None:
        """One event; times are seconds on the run's clock."""
        entry: Event = {"event": event, "rank": self._rank, **fields}
        for sink in self._sinks:
            sink(entry)


class JsonLines:
    """A sink that appends to a file, written at least every second.

    Args:
      path: the file; its folder is made, and a last line in it that was cut short is left out.

    Raises:
      StorageError: when it is made or called: the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = JsonLinesFile(path)
        self._flushed = time.monotonic()

    def __call__(self, event: Event) -> None:
        self._file.add(event)
        if event["event"] != "step" or time.monotonic() - self._flushed > _FLUSH_EVERY_S:
            self._file.flush()
            self._flushed = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.__exit__(kind, error, trace)


def read_events(path: Path) -> list[Event]:
    """The events of a file; a last line that was cut short is left out.

    Raises:
      DataError: it cannot be read, or a line is no event; names file and line.
    """
    events: list[Event] = []

    def take(event: Event) -> None:
        if not isinstance(event["event"], str) or type(event["rank"]) is not int:
            raise TypeError("no name of an event, or no rank")
        events.append(event)

    json_lines(path, "not an event; the file is damaged", take, DataError)
    return events
