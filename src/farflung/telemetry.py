"""What a run says about itself while it goes on: events as JSON lines, alike in both worlds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeAlias

from farflung.errors import DataError
from farflung.types import Json

__all__ = ["BYTES", "TIMES", "Event", "JsonLines", "Sink", "Telemetry", "read_events"]

Event: TypeAlias = "dict[str, Json]"
"""One thing that happened: ``event`` names its kind, ``rank`` the replica, ``t`` the seconds on the run's clock."""
Sink: TypeAlias = "Callable[[Event], None]"
"""Where events go."""

TIMES = frozenset({"compute_s", "data_s", "duration_s", "exposed_s", "held", "t", "time_s"})
"""The fields of events that depend on the run's clock: seconds, and samples held by then; no others do."""
BYTES = frozenset({"bytes_sent", "bytes_sent_per_replica"})
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
    """A sink that appends to a file, written at least every second."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")
        self._flushed = time.monotonic()

    def __call__(self, event: Event) -> None:
        self._file.write(json.dumps(event, separators=(",", ":")) + "\n")
        if event["event"] != "step" or time.monotonic() - self._flushed > _FLUSH_EVERY_S:
            self._file.flush()
            self._flushed = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def read_events(path: Path) -> Iterator[Event]:
    """The events of a file; a last line that was cut short is left out.

    Raises:
      DataError: a line in the middle is no JSON object.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    for number, line in enumerate(lines, start=1):
        if not line:
            continue
        try:
            event = json.loads(line)
        except ValueError:
            if number == len(lines):
                return
            raise DataError(f"{path}, line {number}: not JSON; the file is damaged") from None
        yield event
