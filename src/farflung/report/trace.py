"""A run's telemetry in the Chrome trace event format, which ui.perfetto.dev and chrome://tracing show."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from farflung.report.reading import rank_courses
from farflung.telemetry import Event, number
from farflung.types import Json

__all__ = ["chrome_trace"]

PARTS = {
    "data_s": "wait for data",
    "compute_s": "compute",
    "scoring_s": "score samples",
    "exposed_s": "wait for exchange",
}
"""The parts of a step in their order; they lie one behind the other in it."""
COUNTED = {"mean_loss": "loss", "bytes_sent": "bytes sent", "in_flight": "exchanges under way"}
"""Fields of steps that are drawn as counters."""
BESIDE = {"evaluation": "evaluation", "checkpoint": "checkpoint"}
"""What may run beside the steps, on a track of its own."""


def chrome_trace(events_by_rank: Mapping[int, Sequence[Event]], *, title: str) -> dict[str, Json]:
    """Make a trace of a run: a process for each rank, with its steps, what runs beside them, and its exchanges.

    A rank's clock shows 0 where it begins, which all do once they have met: clocks are off from each other by no more
    than a message takes. That of a rank that joined later is set by a step that it shares. Where a run was resumed
    time goes on.

    Args:
      events_by_rank: of each replica; exchanges are there where the run was traced (``--trace``).
      title: of the run.

    Raises:
      DataError: an event lacks a number.
    """
    told: list[Json] = [
        one
        for rank, course in rank_courses(events_by_rank).items()
        for one in _of_rank(rank, events_by_rank[rank], course.joined_s)
    ]
    return {"traceEvents": told, "displayTimeUnit": "ms", "otherData": {"run": title}}


def _of_rank(rank: int, events: Iterable[Event], joined_s: float) -> Iterator[dict[str, Json]]:
    of = f"rank {rank}"
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": of}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for tid, name in enumerate(("steps", "evaluation, checkpoints")):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}}
    zero, latest = 0.0, joined_s
    for event in events:
        kind = str(event["event"])
        if "t" not in event:
            continue
        if kind == "begin":
            zero = number(event, "t", of) - latest
        latest = number(event, "t", of) - zero
        if kind == "step":
            yield from _step(rank, event, latest, of)
        elif kind in BESIDE:
            took = number(event, "duration_s", of)
            yield _slice(rank, 1, BESIDE[kind], latest - took, took, {"step": event["step"]})
        elif kind == "exchange":
            track: dict[str, Json] = {"cat": "exchange", "name": "exchange", "pid": rank, "tid": 0}
            track["id"] = f"{rank} {event['step']} {event['bucket']}"
            args = {name: event[name] for name in ("step", "due_step", "bucket", "bytes_sent")}
            yield {**track, "ph": "b", "ts": _us(number(event, "began_s", of) - zero), "args": args}
            yield {**track, "ph": "e", "ts": _us(latest)}
        elif kind == "view":
            members = f"view {event['view']}: members {event['members']}"
            yield {"ph": "i", "s": "g", "name": members, "pid": rank, "tid": 0, "ts": _us(latest)}


def _step(rank: int, event: Event, end: float, of: str) -> Iterator[dict[str, Json]]:
    took = number(event, "duration_s", of)
    begin = end - took
    args: dict[str, Json] = {
        name: event[name] for name in ("loss", "samples", "learning_rate") if name in event
    }
    yield _slice(rank, 0, f"step {event['step']}", begin, took, args)
    for field, name in PARTS.items():
        part = number({"scoring_s": 0.0, **event}, field, of)
        if part:
            yield _slice(rank, 0, name, begin, part, {})
        begin += part
    for field, name in COUNTED.items():
        if event.get(field) is not None:
            counted: dict[str, Json] = {name: event[field]}
            yield {"ph": "C", "name": name, "pid": rank, "ts": _us(end), "args": counted}


def _slice(
    rank: int, track: int, name: str, begin: float, took: float, args: dict[str, Json]
) -> dict[str, Json]:
    place: dict[str, Json] = {"pid": rank, "tid": track, "ts": _us(begin), "dur": _us(took)}
    return {"ph": "X", "name": name, **place, "args": args}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
