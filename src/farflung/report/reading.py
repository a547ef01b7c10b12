"""Readers of the events and the summary of a run, which check every figure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from farflung.errors import DataError
from farflung.telemetry import Event, read_number
from farflung.types import Json

__all__ = [
    "OPTIONAL_PARTS",
    "TIME_PARTS",
    "RankHistory",
    "read_rank_histories",
    "read_rank_history",
    "read_time_split",
    "split_sessions",
]

TIME_PARTS = {
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "data_wait": "data wait",
    "scoring": "scoring of samples",
    "evaluation": "evaluation, checkpoints",
    "other": "other",
}
"""Parts of a replica's time, and their labels in tables and pictures."""
OPTIONAL_PARTS: Mapping[str, Json] = {"scoring": 0.0}
"""Parts that tables omit if they are 0, with that default."""
_STEP_FIELDS = {
    "compute": "compute_s",
    "exposed_communication": "exposed_s",
    "data_wait": "data_s",
    "scoring": "scoring_s",
}
"""Fields of a step event that hold the parts of its time."""
HISTORY_EVENTS = {"begin", "step", "evaluation", "checkpoint", "exchange", "view", "end"}


def read_time_split(values: Mapping[str, Json], source: str) -> dict[str, float]:
    """Reads the seconds of each part of a replica's time.

    Raises:
      DataError: The split or a part of it is missing.
    """
    split = values.get("time_s")
    if not isinstance(split, dict):
        raise DataError(f"{source} has no time_s: it is damaged or of another kind")
    return {name: read_number({**OPTIONAL_PARTS, **split}, name, source) for name in TIME_PARTS}


def split_sessions(events: Iterable[Event], source: str) -> Iterator[list[tuple[float, Event]]]:
    """Yields the events of each session with their running seconds, which exclude the time between sessions.

    A session lasts from one ``begin`` to the next. The first list holds what precedes the first ``begin``, and is
    normally empty.

    Raises:
      DataError: An event has no time.
    """
    session: list[tuple[float, Event]] = []
    elapsed_s = begin_s = 0.0
    for event in events:
        if event.get("event") not in HISTORY_EVENTS:
            continue
        time_s = read_number(event, "t", source)
        if event["event"] == "begin":
            yield session
            elapsed_s, begin_s = session[-1][0] if session else 0.0, time_s
            session = []
        session.append((elapsed_s + time_s - begin_s, event))
    yield session


@dataclass(slots=True)
class RankHistory:
    """Events of one replica, each with seconds since it began; repeated steps count once.

    Args:
      steps: Step events by step number.
      evaluations: Evaluation events by the number of steps before them.
      other_events: Checkpoints, exchanges and views since the last ``begin``.
      part_seconds: Seconds by part over all sessions, repeated steps included.
      has_ended: Whether the replica has reached the end of the run.
      joined_s: Time at which the replica began, on the clock of the replicas that began first.
    """

    steps: dict[int, tuple[float, Event]] = field(default_factory=dict)
    evaluations: dict[int, tuple[float, Event]] = field(default_factory=dict)
    other_events: list[tuple[float, Event]] = field(default_factory=list)
    part_seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(TIME_PARTS, 0.0))
    has_ended: bool = False
    joined_s: float = 0.0

    def delay(self, seconds: float) -> None:
        """Shifts the clock of a replica that joined later."""
        self.joined_s += seconds
        self.steps = {step: (t + seconds, event) for step, (t, event) in self.steps.items()}
        self.evaluations = {step: (t + seconds, event) for step, (t, event) in self.evaluations.items()}
        self.other_events = [(t + seconds, event) for t, event in self.other_events]


def read_rank_histories(events_by_rank: Mapping[int, Iterable[Event]]) -> dict[int, RankHistory]:
    """Reads the events of all replicas on one clock, that of the replicas that began first.

    The first step shared with them sets a joiner's clock; without one, the end of the step before does.

    Raises:
      DataError: An event lacks a number.
    """
    histories = {rank: read_rank_history(rank, events_by_rank[rank]) for rank in sorted(events_by_rank)}
    ends: dict[int, float] = {}
    for history in sorted((h for h in histories.values() if h.steps), key=lambda h: min(h.steps)):
        first = min(history.steps)
        if ends and first > min(ends):
            shared = min(history.steps.keys() & ends.keys(), default=None)
            if shared is None:
                history.delay(ends[max(step for step in ends if step < first)])
            else:
                history.delay(ends[shared] - history.steps[shared][0])
        ends = {step: time_s for step, (time_s, _) in history.steps.items()} | ends
    return histories


def read_rank_history(rank: int, events: Iterable[Event]) -> RankHistory:
    """Reads the events of one replica, in the order they were emitted.

    Raises:
      DataError: An event lacks a number.
    """
    history, source = RankHistory(), f"rank {rank}"
    for session in split_sessions(events, source):
        split = dict.fromkeys(TIME_PARTS, 0.0)
        lacks_end = True
        for time_s, event in session:
            kind = event["event"]
            if kind == "begin":
                step = int(read_number(event, "step", source))
                history.steps = {n: item for n, item in history.steps.items() if n < step}
                history.evaluations = {n: item for n, item in history.evaluations.items() if n <= step}
                history.other_events, history.has_ended = [], False
            elif kind == "step":
                history.steps[int(read_number(event, "step", source))] = time_s, event
                for part, name in _STEP_FIELDS.items():
                    split[part] += read_number({"scoring_s": 0.0, **event}, name, source)
            elif kind == "end":
                leg = event.get("last_leg")
                split = read_time_split(leg if isinstance(leg, dict) else event, f"{source}: its end")
                lacks_end, history.has_ended = False, True
            elif kind == "evaluation":
                history.evaluations[int(read_number(event, "step", source))] = time_s, event
            else:
                history.other_events.append((time_s, event))
            if kind in ("evaluation", "checkpoint"):
                split["evaluation"] += read_number(event, "duration_s", source)
        if lacks_end and session:
            split["other"] = max(0.0, session[-1][0] - session[0][0] - sum(split.values()))
        for name, value in split.items():
            history.part_seconds[name] += value
    return history
