"""Conversion of telemetry to the Chrome trace event format, for ui.perfetto.dev and chrome://tracing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from farflung.report.reading import read_rank_histories
from farflung.telemetry import Event, read_number
from farflung.types import Json

__all__ = ["build_chrome_trace"]

STEP_PARTS = {
    "data_s": "wait for data",
    "compute_s": "compute",
    "scoring_s": "score samples",
    "exposed_s": "wait for exchange",
}
"""Parts of a step in their order; a trace draws them one after the other."""
COUNTER_FIELDS = {"mean_loss": "loss", "bytes_sent": "bytes sent", "in_flight": "exchanges under way"}
"""Step fields that are drawn as counters."""
BACKGROUND_EVENTS = {"evaluation": "evaluation", "checkpoint": "checkpoint"}
"""Events that may overlap steps, drawn on a track of their own."""


def build_chrome_trace(events_by_rank: Mapping[int, Sequence[Event]], *, title: str) -> dict[str, Json]:
    """Builds a trace of a run: a process for each rank, with its steps, background events and exchanges.

    A rank's clock starts at 0 when it begins. All ranks begin once they have met, so clocks differ by at most a
    message's latency. A step shared with the others sets the clock of a rank that joined later. Time continues
    across a resume.

    Args:
      events_by_rank: Events of each replica; they contain exchanges if the run was traced (``--trace``).
      title: Title of the run.

    Raises:
      DataError: An event lacks a number.
    """
    trace_events: list[Json] = [
        trace_event
        for rank, history in read_rank_histories(events_by_rank).items()
        for trace_event in _trace_rank(rank, events_by_rank[rank], history.joined_s)
    ]
    return {"traceEvents": trace_events, "displayTimeUnit": "ms", "otherData": {"run": title}}


def _trace_rank(rank: int, events: Iterable[Event], joined_s: float) -> Iterator[dict[str, Json]]:
    source = f"rank {rank}"
    yield {"ph": "M", "name": "process_name", "pid": rank, "args": {"name": source}}
    yield {"ph": "M", "name": "process_sort_index", "pid": rank, "args": {"sort_index": rank}}
    for tid, name in enumerate(("steps", "evaluation, checkpoints")):
        yield {"ph": "M", "name": "thread_name", "pid": rank, "tid": tid, "args": {"name": name}}
    offset_s, time_s = 0.0, joined_s
    for event in events:
        kind = str(event["event"])
        if "t" not in event:
            continue
        if kind == "begin":
            offset_s = read_number(event, "t", source) - time_s
        time_s = read_number(event, "t", source) - offset_s
        if kind == "step":
            yield from _trace_step(rank, event, time_s, source)
        elif kind in BACKGROUND_EVENTS:
            duration_s = read_number(event, "duration_s", source)
            yield _build_slice(
                rank, 1, BACKGROUND_EVENTS[kind], time_s - duration_s, duration_s, {"step": event["step"]}
            )
        elif kind == "exchange":
            track: dict[str, Json] = {"cat": "exchange", "name": "exchange", "pid": rank, "tid": 0}
            track["id"] = f"{rank} {event['step']} {event['bucket']}"
            args = {name: event[name] for name in ("step", "due_step", "bucket", "bytes_sent")}
            yield {
                **track,
                "ph": "b",
                "ts": _to_us(read_number(event, "began_s", source) - offset_s),
                "args": args,
            }
            yield {**track, "ph": "e", "ts": _to_us(time_s)}
        elif kind == "view":
            members = f"view {event['view']}: members {event['members']}"
            yield {"ph": "i", "s": "g", "name": members, "pid": rank, "tid": 0, "ts": _to_us(time_s)}


def _trace_step(rank: int, event: Event, end: float, source: str) -> Iterator[dict[str, Json]]:
    duration_s = read_number(event, "duration_s", source)
    begin = end - duration_s
    args: dict[str, Json] = {
        name: event[name] for name in ("loss", "samples", "learning_rate") if name in event
    }
    yield _build_slice(rank, 0, f"step {event['step']}", begin, duration_s, args)
    for field, name in STEP_PARTS.items():
        part = read_number({"scoring_s": 0.0, **event}, field, source)
        if part:
            yield _build_slice(rank, 0, name, begin, part, {})
        begin += part
    for field, name in COUNTER_FIELDS.items():
        if event.get(field) is not None:
            counters: dict[str, Json] = {name: event[field]}
            yield {"ph": "C", "name": name, "pid": rank, "ts": _to_us(end), "args": counters}


def _build_slice(
    rank: int, track: int, name: str, begin: float, duration_s: float, args: dict[str, Json]
) -> dict[str, Json]:
    position: dict[str, Json] = {"pid": rank, "tid": track, "ts": _to_us(begin), "dur": _to_us(duration_s)}
    return {"ph": "X", "name": name, **position, "args": args}


def _to_us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
