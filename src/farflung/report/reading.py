"""Figures in the events and the summary of a run, checked as they are read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from farflung.errors import DataError
from farflung.telemetry import Event
from farflung.types import Json

__all__ = ["PARTS_OF_TIME", "SELDOM", "number", "sessions", "time_split"]

PARTS_OF_TIME = {
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "data_wait": "data wait",
    "scoring": "scoring of samples",
    "evaluation": "evaluation, checkpoints",
    "other": "other",
}
"""The parts that a replica's time is split into, and their names in tables and pictures."""
SELDOM: Mapping[str, Json] = {"scoring": 0.0}
"""Those that a run leaves out which had none of them."""
TOLD = {"begin", "step", "evaluation", "checkpoint", "end"}


def number(values: Mapping[str, Json], name: str, of: str = "the run") -> float:
    """Reads one number of an event, or of a summary.

    Args:
      values: the event or the summary.
      name: of the number.
      of: begins the message of the error.

    Raises:
      DataError: there is no such number.
    """
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        if "event" in values:
            raise DataError(f"{of}: no number {name} in an event ({values['event']}); its events are damaged")
        raise DataError(f"{of} has no number {name}: it is damaged or of another kind")
    return value


def time_split(values: Mapping[str, Json], of: str) -> dict[str, float]:
    """Reads the seconds of each part of a replica's time.

    Raises:
      DataError: there are none, or a part is absent.
    """
    split = values.get("time_s")
    if not isinstance(split, dict):
        raise DataError(f"{of} has no time_s: it is damaged or of another kind")
    return {name: number({**SELDOM, **split}, name, of) for name in PARTS_OF_TIME}


def sessions(events: Iterable[Event], of: str) -> Iterator[list[tuple[float, Event]]]:
    """Gives the events of each session of a run, from one ``begin`` to the next, with seconds since the first.

    In a run that was resumed, time goes on where it stopped.

    Raises:
      DataError: an event has no time.
    """
    session: list[tuple[float, Event]] = []
    before = begin = 0.0
    for event in events:
        if event.get("event") not in TOLD:
            continue
        t = number(event, "t", of)
        if event["event"] == "begin":
            yield session
            before, begin = session[-1][0] if session else 0.0, t
            session = []
        session.append((before + t - begin, event))
    yield session
