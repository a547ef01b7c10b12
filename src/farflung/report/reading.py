"""Figures in the events and the summary of a run, checked as they are read."""

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
"""The parts that a replica's time is split into, and their names in tables and pictures."""
SELDOM: Mapping[str, Json] = {"scoring": 0.0}
"""Those that a run leaves out which had none of them."""
_FIELDS = {
    "compute": "compute_s",
    "exposed_communication": "exposed_s",
    "data_wait": "data_s",
    "scoring": "scoring_s",
}
"""The fields of a step that tell of parts of its time."""
TOLD = {"begin", "step", "evaluation", "checkpoint", "exchange", "view", "end"}


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


@dataclass(slots=True)
class RankCourse:
    """What one replica has told, each event with seconds since its beginning; steps that were done again count once.

    Args:
      steps: by number.
      evaluations: by the number of steps before them.
      others: checkpoints, exchanges and views since the last ``begin``.
      seconds: by part, over all sessions; those of steps that were done again are among them.
      ended: whether it has come to the end of the run.
      joined_s: when it began, on the clock of the replicas that began first.
    """

    steps: dict[int, tuple[float, Event]] = field(default_factory=dict)
    evaluations: dict[int, tuple[float, Event]] = field(default_factory=dict)
    others: list[tuple[float, Event]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS_OF_TIME, 0.0))
    ended: bool = False
    joined_s: float = 0.0

    def delay(self, seconds: float) -> None:
        """Sets the clock of a replica that joined later."""
        self.joined_s += seconds
        self.steps = {step: (at + seconds, event) for step, (at, event) in self.steps.items()}
        self.evaluations = {step: (at + seconds, event) for step, (at, event) in self.evaluations.items()}
        self.others = [(at + seconds, event) for at, event in self.others]


def rank_courses(events_by_rank: Mapping[int, Iterable[Event]]) -> dict[int, RankCourse]:
    """Reads the events of all replicas on one clock, that of the replicas that began first.

    The first step that a joiner shares with them sets its clock; until there is one, the end of the step before does.

    Raises:
      DataError: an event lacks a number.
    """
    courses = {rank: rank_course(rank, events_by_rank[rank]) for rank in sorted(events_by_rank)}
    ends: dict[int, float] = {}
    for course in sorted(filter(lambda one: one.steps, courses.values()), key=lambda one: min(one.steps)):
        first = min(course.steps)
        if ends and first > min(ends):
            shared = min(course.steps.keys() & ends.keys(), default=None)
            if shared is None:
                course.delay(ends[max(step for step in ends if step < first)])
            else:
                course.delay(ends[shared] - course.steps[shared][0])
        ends = {step: at for step, (at, _) in course.steps.items()} | ends
    return courses


def rank_course(rank: int, events: Iterable[Event]) -> RankCourse:
    """Reads the events of one replica, in the order they were emitted.

    Raises:
      DataError: one lacks a number.
    """
    course, of = RankCourse(), f"rank {rank}"
    for session in sessions(events, of):
        split = dict.fromkeys(PARTS_OF_TIME, 0.0)
        other = True
        for at, event in session:
            kind = event["event"]
            if kind == "begin":
                step = int(number(event, "step", of))
                course.steps = {done: told for done, told in course.steps.items() if done < step}
                course.evaluations = {done: told for done, told in course.evaluations.items() if done <= step}
                course.others, course.ended = [], False
            elif kind == "step":
                course.steps[int(number(event, "step", of))] = at, event
                for part, name in _FIELDS.items():
                    split[part] += number({"scoring_s": 0.0, **event}, name, of)
            elif kind == "end":
                leg = event.get("last_leg")
                split = time_split(leg if isinstance(leg, dict) else event, f"{of}: its end")
                other, course.ended = False, True
            elif kind == "evaluation":
                course.evaluations[int(number(event, "step", of))] = at, event
            else:
                course.others.append((at, event))
            if kind in ("evaluation", "checkpoint"):
                split["evaluation"] += number(event, "duration_s", of)
        if other and session:
            split["other"] = max(0.0, session[-1][0] - session[0][0] - sum(split.values()))
        for name, value in split.items():
            course.seconds[name] += value
    return course
