"""A picture of a run that goes on where replicas are lost: members, steps made again, durations of steps, and loss."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from farflung.errors import DataError
from farflung.report.pictures import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LIGHT_BLUE,
    RAW_AT_LEAST,
    VERMILLION,
    YELLOW,
    name_rows,
    picture,
    smooth,
    ticks,
)
from farflung.report.reading import number
from farflung.telemetry import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["elastic_picture"]

MOST_ROWS = 24
"""With more ranks rows are lower."""
NEAR = 0.06
"""Views within this share of all steps have one label."""


class _View(NamedTuple):
    """An event ``view``: its number, the first step of its members, and the steps before that are made again."""

    number: int
    step: int
    members: set[int]
    lost: set[int]
    joined: set[int]
    again: set[int]


class _Course(NamedTuple):
    """What a replica tells: the step that it began at last, its views since, and its steps."""

    begin: int
    views: list[_View]
    losses: dict[int, float]
    durations: dict[int, float]

    @property
    def end(self) -> int:
        return max(self.durations, default=-1) + 1


def elastic_picture(
    events_by_rank: Mapping[int, Iterable[Event]],
    path: Path,
    *,
    title: str,
    simulated: bool,
    beside: Mapping[int, Iterable[Event]] | None = None,
) -> bool:
    """Draws the members at each step of a run, steps that were made again, how long steps took, and the loss.

    In a run that was resumed, members are those since.

    Args:
      events_by_rank: the events of each replica, in the order they were emitted.
      path: the picture; its folder is made, and it appears whole or not at all.
      title: stands above the picture.
      simulated: marks the picture as simulated.
      beside: the events of a run without faults, whose loss is drawn too.

    Returns:
      Whether there was anything to draw: a run whose members have not changed tells of no view.

    Raises:
      DataError: an event is damaged.
      MissingExtra: matplotlib is not installed.
    """
    courses = {rank: _course(rank, events_by_rank[rank]) for rank in sorted(events_by_rank)}
    by_end = sorted(courses.values(), key=lambda course: (course.end, len(course.views)))
    if not by_end or not (views := by_end[-1].views):
        return False
    first = (views[0].members - views[0].joined) | views[0].lost
    begin = min((courses[rank].begin for rank in first if rank in courses), default=0)
    ranks = sorted(first.union(*(view.members for view in views)))
    height = 0.8 + 0.3 * min(len(ranks), MOST_ROWS)
    with picture(path, (13, 5.4 + height), title, simulated=simulated) as figure:
        rows = figure.subplots(3, 1, sharex=True, height_ratios=[height, 1.5, 2.4])
        members, durations, losses = rows
        members.set_title("Members", pad=26)
        _draw_members(members, ranks, first, views, begin, by_end[-1].end)
        durations.set(
            title="Longest step of any member", ylabel="simulated seconds" if simulated else "seconds"
        )
        longest: dict[int, float] = {}
        for course in courses.values():
            longest.update({at: max(took, longest.get(at, 0.0)) for at, took in course.durations.items()})
        durations.plot(
            sorted(longest), [took for _, took in sorted(longest.items())], color=INK, linewidth=1.2
        )
        durations.set_ylim(bottom=0)
        losses.set(title="Training loss", xlabel="step", ylabel="mean loss over the members")
        if beside is not None:
            others = (_course(rank, events) for rank, events in beside.items())
            _draw_losses(losses, others, GREY, "without faults")
        _draw_losses(losses, by_end, BLUE, "this run")
        losses.legend(loc="upper right")
        for axes in rows:
            for view in views:
                axes.axvline(view.step - 0.5, color=GREY, linewidth=1, linestyle=(0, (4, 3)), zorder=0.5)
        ticks(losses.xaxis, 10, whole=True)
    return True


def _course(rank: int, events: Iterable[Event]) -> _Course:
    of, course = f"rank {rank}", _Course(0, [], {}, {})
    for event in events:
        if event["event"] == "begin":
            begin = int(number(event, "step", of))
            course = _Course(
                begin, [], *({at: one for at, one in values.items() if at < begin} for values in course[2:])
            )
        elif event["event"] == "step":
            step = int(number(event, "step", of))
            course.durations[step] = number(event, "duration_s", of)
            if event.get("mean_loss") is not None and math.isfinite(loss := number(event, "mean_loss", of)):
                course.losses[step] = loss
        elif event["event"] == "view":
            view, step = (int(number(event, name, of)) for name in ("view", "step"))
            told = (
                _numbers({"again": [], **event}, name, of) for name in ("members", "lost", "joined", "again")
            )
            course.views.append(_View(view, step, *told))
    return course


def _numbers(event: Event, name: str, of: str) -> set[int]:
    values = event.get(name)
    if not isinstance(values, list) or any(type(value) is not int for value in values):
        raise DataError(f"{of}: no numbers {name} in an event (view); its events are damaged")
    return {int(str(value)) for value in values}


def _draw_members(
    axes: Axes, ranks: Sequence[int], first: set[int], views: Sequence[_View], begin: int, end: int
) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    since = dict.fromkeys(first, begin)

    def bar(rank: int, start: int, stop: int, colour: str, zorder: float) -> None:
        axes.barh(
            ranks.index(rank), max(0, stop - start), left=start - 0.5, height=0.64, color=colour, edgecolor=colour,
            linewidth=1, zorder=zorder,
        )  # fmt: skip

    def mark(rank: int, step: int, marker: str, colour: str) -> None:
        axes.plot(step - 0.5, ranks.index(rank), marker, color=colour, markersize=8, zorder=3)

    for view in views:
        stop = min(view.step, end)
        for rank in sorted(since):
            lost = rank in view.lost
            again = [step for step in view.again if since[rank] <= step < stop]
            for step in again:
                bar(rank, step, step + 1, VERMILLION if lost else YELLOW, 2)
            if lost:
                bar(rank, since.pop(rank), min([stop, *again]), LIGHT_BLUE, 1)
                mark(rank, stop, "X", INK)
        for rank in view.joined:
            since[rank] = view.step
            mark(rank, view.step, ">", GREEN)
    for rank, step in since.items():
        bar(rank, step, end, LIGHT_BLUE, 1)
    while views:
        near = [view for view in views if view.step < views[0].step + NEAR * (end - begin)]
        words = " to ".join(dict.fromkeys([str(near[0].number), str(near[-1].number)]))
        axes.annotate(
            f"view {words}", (near[0].step - 0.5, 1), (3, 2), xycoords=("data", "axes fraction"),
            textcoords="offset points", fontsize=9,
        )  # fmt: skip
        views = views[len(near) :]
    name_rows(axes, [str(rank) for rank in ranks])
    axes.legend(
        handles=[
            Patch(color=LIGHT_BLUE, label="member"),
            Patch(color=YELLOW, label="exchanges made again"),
            Patch(color=VERMILLION, label="batch taken again by the others"),
            Line2D([], [], color=INK, marker="X", linestyle="", markersize=8, label="lost"),
            Line2D([], [], color=GREEN, marker=">", linestyle="", markersize=8, label="joined"),
        ],
        loc="lower right", bbox_to_anchor=(1, 1), ncols=5, borderaxespad=2.2,
    )  # fmt: skip


def _draw_losses(axes: Axes, courses: Iterable[_Course], colour: str, label: str) -> None:
    """Draws the loss of each step, which is alike on all members; where there are many, their moving mean."""
    losses: dict[int, float] = {}
    for course in courses:
        losses.update(course.losses)
    steps, values = sorted(losses), np.array([losses[step] for step in sorted(losses)])
    axes.plot(
        steps, values if len(steps) < RAW_AT_LEAST else smooth(values, max(2, len(steps) // 50)),
        color=colour, linewidth=1.8, label=label,
    )  # fmt: skip
