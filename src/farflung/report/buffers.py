"""A picture of samples that arrive: how many wait to be used, and how long steps wait for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.errors import DataError
from farflung.report.pictures import BLUE, GREY, ROUND, picture
from farflung.telemetry import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["buffers_picture"]

MOST_NAMED = 10
"""With more replicas than this lines are not told apart, and the one in the middle stands out."""

WIDE = 50
"""Where counts differ by more than this factor, powers of ten are as far apart as each other."""


@dataclass(slots=True)
class _Course:
    """Of one replica, step by step."""

    seconds: list[float] = field(default_factory=list)
    """Since the run's beginning, sessions of a resumed run one after the other."""
    held: list[float] = field(default_factory=list)
    """Samples that were there when the step chose its own."""
    waited: list[float] = field(default_factory=list)
    """Seconds that all steps so far have waited for samples."""


def buffers_picture(
    events_by_rank: Mapping[int, Iterable[Event]], path: Path, *, title: str, simulated: bool
) -> bool:
    """Draws what replicas held, and what they waited, over time, where samples arrive.

    Args:
      events_by_rank: the events of each replica, in the order they were emitted.
      path: the picture; its folder is made, and it appears whole or not at all.
      title: stands above the picture.
      simulated: marks the picture, and its axes of time, as simulated.

    Returns:
      Whether there was anything to draw: no step of a run that has all samples from the start says what it held.

    Raises:
      DataError: an event is damaged.
      MissingExtra: matplotlib is not installed.
    """
    courses = {rank: _course(rank, events_by_rank[rank]) for rank in sorted(events_by_rank)}
    if not any(course.held for course in courses.values()):
        return False
    with picture(path, (11, 4.6), title, simulated=simulated) as figure:
        left, right = figure.subplots(1, 2)
        clock = "simulated time" if simulated else "time"
        left.set(title="Samples held at each step", xlabel=f"{clock} (s)", ylabel="samples")
        right.set(title="Waited for samples", xlabel=f"{clock} (s)", ylabel="seconds, of all steps so far")
        _lines(left, {rank: (course.seconds, course.held) for rank, course in courses.items()})
        _lines(right, {rank: (course.seconds, course.waited) for rank, course in courses.items()})
        counts = [count for course in courses.values() for count in course.held]
        if max(counts) > WIDE * max(1.0, min(counts)):
            left.set_yscale("symlog", linthresh=10)
        left.set_ylim(bottom=0)
        left.legend(title="rank" if len(courses) <= MOST_NAMED else None, ncols=2, fontsize=9)
    return True


def _course(rank: int, events: Iterable[Event]) -> _Course:
    course, before, begin, last, waited = _Course(), 0.0, 0.0, 0.0, 0.0
    for event in events:
        kind = event.get("event")
        if kind == "begin":
            before, begin = before + last - begin, _number(rank, event, "t")
            last = begin
        elif kind == "step" and "held" in event:
            last = _number(rank, event, "t")
            waited += _number(rank, event, "data_s")
            course.seconds.append(before + last - begin)
            course.held.append(_number(rank, event, "held"))
            course.waited.append(waited)
    return course


def _number(rank: int, event: Event, name: str) -> float:
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(
            f"rank {rank}: no number {name} in an event ({event['event']}); the events are damaged"
        )
    return value


def _lines(axes: Axes, lines: Mapping[int, tuple[list[float], list[float]]]) -> None:
    from matplotlib import colormaps
    from matplotlib.ticker import MaxNLocator

    named = len(lines) <= MOST_NAMED
    shades = colormaps["viridis"]
    for number, (rank, (seconds, values)) in enumerate(lines.items()):
        colour = shades(number / max(1, len(lines) - 1) * 0.9) if named else GREY
        axes.plot(
            seconds, values, color=colour, linewidth=1.4 if named else 0.8, label=str(rank) if named else None
        )
    if not named:
        by_end = sorted(lines, key=lambda rank: lines[rank][1][-1:])
        middle = by_end[len(by_end) // 2]
        axes.plot(*lines[middle], color=BLUE, linewidth=2, label=f"rank {middle}, in the middle at the end")
    axes.set_xlim(left=0)
    axes.xaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
