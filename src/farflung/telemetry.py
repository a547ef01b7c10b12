"""What a run says about itself while it goes on: events as JSON lines, alike in both worlds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TypeAlias

from farflung.errors import DataError
from farflung.files import JsonLinesFile, json_lines
from farflung.types import Json

__all__ = [
    "BYTES",
    "TIMES",
    "Event",
    "JsonLines",
    "Sink",
    "Telemetry",
    "both",
    "count_refusals",
    "number",
    "read_events",
]

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


def both(one: Sink, other: Sink) -> Sink:
    """Makes a sink that hands each event to two others."""

    def tell(event: Event) -> None:
        one(event)
        other(event)

    return tell


class JsonLines(JsonLinesFile):
    """A sink that appends to a file, written at least every second and at every event but that of a step."""

    def __call__(self, event: Event) -> None:
        self.add(event, flush=event["event"] != "step")


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


def count_refusals(events: Iterable[Event]) -> Counter[str]:
    """Counts the messages and connections of strangers that replicas have refused, over all legs of a run."""
    refusals: Counter[str] = Counter()
    for event in events:
        if event["event"] == "refused":
            refusals.update({what: int(number(event, what)) for what in ("messages", "connections")})
    return refusals


def number(values: Mapping[str, Json], name: str, of: str = "") -> float:
    """Reads one number of an event, or of a summary.

    Args:
      values: the event or the summary.
      name: of the number.
      of: begins the message of the error; the rank of the event when not given.

    Raises:
      DataError: there is no such number.
    """
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        of = of or (f"rank {values['rank']}" if "rank" in values else "the run")
        if "event" in values:
            raise DataError(f"{of}: no number {name} in an event ({values['event']}); its events are damaged")
        raise DataError(f"{of} has no number {name}: it is damaged or of another kind")
    return value
