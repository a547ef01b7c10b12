"""Telemetry of a run: events as JSON lines, in the same format on the wall clock and in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from farflung.errors import DataError
from farflung.files import JsonLinesFile, read_json_lines
from farflung.types import Json

__all__ = [
    "BYTE_FIELDS",
    "TIME_FIELDS",
    "Event",
    "JsonLinesSink",
    "Sink",
    "Telemetry",
    "combine_sinks",
    "count_refusals",
    "read_events",
    "read_number",
]

Event: TypeAlias = "dict[str, Json]"
"""JSON object of one event: ``event`` is its kind, ``rank`` the replica, ``t`` the seconds on the run's clock."""
Sink: TypeAlias = "Callable[[Event], None]"
"""Function that receives events."""

TIME_FIELDS = frozenset(
    {
        "buffered",
        "buffered_nbytes",
        "compute_s",
        "data_s",
        "duration_s",
        "exposed_s",
        "scoring_s",
        "t",
        "time_s",
    }
)
"""Names of all event fields that depend on the run's clock: seconds, and the buffer fill of a stream."""
BYTE_FIELDS = frozenset({"bytes_sent", "bytes_sent_per_replica", "bytes_sent_to"})
"""Names of event fields with sent bytes, which depend on the network if it selects the collective."""


class Telemetry:
    """Emitter of one replica's events.

    Args:
      rank: Rank of the replica.
      sinks: Functions that receive each event.
    """

    def __init__(self, rank: int, *sinks: Sink) -> None:
        self._rank, self._sinks = rank, sinks

    def emit(self, event: str, **fields: Json) -> None:
        """Sends an event to all sinks; times are seconds on the run's clock."""
        entry: Event = {"event": event, "rank": self._rank, **fields}
        for sink in self._sinks:
            sink(entry)


def combine_sinks(first: Sink, second: Sink) -> Sink:
    """Creates a sink that passes each event to two others."""

    def emit(event: Event) -> None:
        first(event)
        second(event)

    return emit


class JsonLinesSink(JsonLinesFile):
    """Sink that appends to a file, flushed at least every second and at every event except steps."""

    def __call__(self, event: Event) -> None:
        self.add(event, flush=event["event"] != "step")


def read_events(path: Path) -> list[Event]:
    """Reads the events of a file; a truncated last line is ignored.

    Raises:
      DataError: The file cannot be read, or a line is not an event; the message names file and line.
    """
    events: list[Event] = []

    def add_event(event: Event) -> None:
        if not isinstance(event["event"], str) or type(event["rank"]) is not int:
            raise TypeError("no name of an event, or no rank")
        events.append(event)

    read_json_lines(path, "not an event; the file is damaged", add_event, DataError)
    return events


def count_refusals(events: Iterable[Event]) -> Counter[str]:
    """Counts the unauthenticated messages and connections that replicas refused, over all legs of a run."""
    refusals: Counter[str] = Counter()
    for event in events:
        if event["event"] == "refused":
            refusals.update({name: int(read_number(event, name)) for name in ("messages", "connections")})
    return refusals


def read_number(values: Mapping[str, Json], name: str, source: str = "") -> float:
    """Reads one number of an event or summary.

    Args:
      values: Event or summary.
      name: Key of the number.
      source: Prefix of the error message; the event's rank by default.

    Raises:
      DataError: The number is missing, or not a number.
    """
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        source = source or (f"rank {values['rank']}" if "rank" in values else "the run")
        if "event" in values:
            raise DataError(
                f"{source}: no number {name} in an event ({values['event']}); its events are damaged"
            )
        raise DataError(f"{source} has no number {name}: it is damaged or of another kind")
    return value
