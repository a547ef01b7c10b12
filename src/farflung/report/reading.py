"""Readers of the events and the summary of a run, which check every figure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from farflung.errors import DataError
from farflung.telemetry import Event, number
from farflung.types import Json

__all__ = [
    "PARTS_OF_TIME",
    "SELDOM",
    "RankCourse",
    "rank_course",
    "rank_courses",
    "sessions",
    "time_split",
]

PARTS_OF_TIME = {
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "data_wait": "data wait",
    "scoring": "scoring of samples",
    "evaluation": "evaluation, checkpoints",
    "other": "other",
}
"""Parts of a replica's time, and their labels in tables and pictures."""
SELDOM: Mapping[str, Json] = {"scoring": 0.0}
"""Parts that tables omit if they are 0, with that default."""
_FIELDS = {
    "compute": "compute_s",
    "exposed_communication": "exposed_s",
    "data_wait": "data_s",
    "scoring": "scoring_s",
}
"""Fields of a step event that hold the parts of its time."""
TOLD = {"begin", "step", "evaluation", "checkpoint", "exchange", "view", "end"}


def time_split(values: Mapping[str, Json], of: str) -> dict[str, float]:
    """Reads the seconds of each part of a replica's time.

    Raises:
      DataError: The split or a part of it is missing.
    """
    split = values.get("time_s")
    if not isinstance(split, dict):
        raise DataError(f"{of} has no time_s: it is damaged or of another kind")
    return {name: number({**SELDOM, **split}, name, of) for name in PARTS_OF_TIME}


def sessions(events: Iterable[Event], of: str) -> Iterator[list[tuple[float, Event]]]:
    """Yields the events of each session of a run, with seconds since the first ``begin``.

    A session lasts from one ``begin`` to the next. After a resume, time continues where it stopped.

    Raises:
      DataError: An event has no time.
    """
    session: list[tuple[float, Event]] = []
    elapsed_s = begin_s = 0.0
    for event in events:
        if event.get("event") not in TOLD:
            continue
        time_s = number(event, "t", of)
        if event["event"] == "begin":
            yield session
            elapsed_s, begin_s = session[-1][0] if session else 0.0, time_s
            session = []
        session.append((elapsed_s + time_s - begin_s, event))
    yield session


@dataclass(slots=True)
class RankCourse:
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
    others: list[tuple[float, Event]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS_OF_TIME, 0.0))
    ended: bool = False
    joined_s: float = 0.0

    def delay(self, seconds: float) -> None:
        """Shifts the clock of a replica that joined later."""
        self.joined_s += seconds
        self.steps = {step: (t + seconds, event) for step, (t, event) in self.steps.items()}
        self.evaluations = {step: (t + seconds, event) for step, (t, event) in self.evaluations.items()}
        self.others = [(t + seconds, event) for t, event in self.others]


def rank_courses(events_by_rank: Mapping[int, Iterable[Event]]) -> dict[int, RankCourse]:
    """Reads the events of all replicas on one clock, that of the replicas that began first.

    The first step shared with them sets a joiner's clock; without one, the end of the step before does.

    Raises:
      DataError: An event lacks a number.
    """
    histories = {rank: rank_course(rank, events_by_rank[rank]) for rank in sorted(events_by_rank)}
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


def rank_course(rank: int, events: Iterable[Event]) -> RankCourse:
    """Reads the events of one replica, in the order they were emitted.

    Raises:
      DataError: An event lacks a number.
    """
    history, source = RankCourse(), f"rank {rank}"
    for session in sessions(events, source):
        split = dict.fromkeys(PARTS_OF_TIME, 0.0)
        lacks_end = True
        for time_s, event in session:
            kind = event["event"]
            if kind == "begin":
                step = int(number(event, "step", source))
                history.steps = {n: item for n, item in history.steps.items() if n < step}
                history.evaluations = {n: item for n, item in history.evaluations.items() if n <= step}
                history.others, history.ended = [], False
            elif kind == "step":
                history.steps[int(number(event, "step", source))] = time_s, event
                for part, name in _FIELDS.items():
                    split[part] += number({"scoring_s": 0.0, **event}, name, source)
            elif kind == "end":
                leg = event.get("last_leg")
                split = time_split(leg if isinstance(leg, dict) else event, f"{source}: its end")
                lacks_end, history.ended = False, True
            elif kind == "evaluation":
                history.evaluations[int(number(event, "step", source))] = time_s, event
            else:
                history.others.append((time_s, event))
            if kind in ("evaluation", "checkpoint"):
                split["evaluation"] += number(event, "duration_s", source)
        if lacks_end and session:
            split["other"] = max(0.0, session[-1][0] - session[0][0] - sum(split.values()))
        for name, value in split.items():
            history.seconds[name] += value
    return history
