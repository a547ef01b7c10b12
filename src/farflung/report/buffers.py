"""A picture of samples that arrive: how many wait to be used, and how long steps wait for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.report.pictures import BLUE, GREY, picture, ticks, time_label
from farflung.report.reading import number, sessions
from farflung.telemetry import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["buffers_picture"]

MOST_NAMED = 10
"""With more replicas than this lines are not told apart, and the one in the middle stands out."""

WIDE = 50
"""Where counts differ by more than this factor, powers of ten are as far apart as each other."""


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
    counts = [count for _, held, _ in courses.values() for count in held]
    if not counts:
        return False
    with picture(path, (11, 4.6), title, simulated=simulated) as figure:
        left, right = figure.subplots(1, 2)
        left.set(title="Samples held at each step", ylabel="samples")
        right.set(title="Waited for samples", ylabel="seconds, of all steps so far")
        _lines(left, {rank: (seconds, held) for rank, (seconds, held, _) in courses.items()})
        _lines(right, {rank: (seconds, waited) for rank, (seconds, _, waited) in courses.items()})
        for axes in (left, right):
            axes.set_xlabel(time_label(simulated=simulated))
            axes.set_xlim(left=0)
            ticks(axes.xaxis)
        if max(counts) > WIDE * max(1.0, min(counts)):
            left.set_yscale("symlog", linthresh=10)
        left.set_ylim(bottom=0)
        left.legend(title="rank" if len(courses) <= MOST_NAMED else None, ncols=2)
    return True


def _course(rank: int, events: Iterable[Event]) -> tuple[list[float], list[float], list[float]]:
    """Gives for each step of a replica its time, samples held, and seconds that all steps so far have waited."""
    of = f"rank {rank}"
    seconds: list[float] = []
    held: list[float] = []
    waited: list[float] = []
    for session in sessions(events, of):
        for at, event in session:
            if "held" in event:
                seconds.append(at)
                held.append(number(event, "held", of))
                waited.append(sum(waited[-1:]) + number(event, "data_s", of))
    return seconds, held, waited


def _lines(axes: Axes, lines: Mapping[int, tuple[list[float], list[float]]]) -> None:
    from matplotlib import colormaps

    named = len(lines) <= MOST_NAMED
    shades = colormaps["viridis"]
    for place, (rank, line) in enumerate(lines.items()):
        if named:
            colour = shades(place / max(1, len(lines) - 1) * 0.9)
            axes.plot(*line, color=colour, linewidth=1.4, label=str(rank))
        else:
            axes.plot(*line, color=GREY, linewidth=0.8)
    if not named:
        by_end = sorted(lines, key=lambda rank: lines[rank][1][-1:])
        middle = by_end[len(by_end) // 2]
        axes.plot(*lines[middle], color=BLUE, linewidth=2, label=f"rank {middle}, in the middle at the end")
