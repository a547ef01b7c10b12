"""Picture of coded training: devices, redundancy, and objective over time."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.errors import DataError
from farflung.report.pictures import (
    BLUE,
    GREEN,
    GREY,
    INK,
    LIGHT_BLUE,
    VERMILLION,
    YELLOW,
    name_rows,
    picture,
    say,
    ticks,
    time_label,
)
from farflung.telemetry import Event, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["coded_picture"]

STATES = {"joins": LIGHT_BLUE, "encodes": YELLOW, "takes part": BLUE, "silent": GREY}
"""Colour of each state of a device."""
MOST_NAMED = 30
"""Maximum number of devices that are all labelled with their rank."""
KINDS = {"rows": (BLUE, "-"), "columns": (GREEN, "--")}


@dataclass(slots=True)
class _Device:
    """States of one device over time.

    Args:
      spans: Start, end and name of each state.
      is_gone: True if it has left or vanished.
      has_asked: True if it asked to leave.
      state_start_s: Start of the current state, or time of the end.
    """

    spans: list[tuple[float, float, str]] = field(default_factory=list)
    gone: bool = False
    asked: bool = False
    since: float = 0.0
    state: str = "joins"
    silent: bool = False
    joined: bool = False
    making: set[int] = field(default_factory=set)

    @property
    def vanished(self) -> bool:
        return self.gone and not self.asked

    def becomes(self, t: float, *, gone: bool = False) -> None:
        """Ends a span if the state has changed."""
        state = "takes part" if self.joined else "joins"
        state = "silent" if self.silent else "encodes" if self.making else state
        if gone or state != self.state:
            if t > self.since:
                self.spans.append((self.since, t, self.state))
            self.since, self.state = t, state
        self.gone = gone


@dataclass(slots=True)
class _Course:
    """A run over time, with sessions one after the other."""

    devices: list[tuple[int, _Device]] = field(default_factory=list)
    redundancy: list[tuple[float, list[float]]] = field(default_factory=list)
    objectives: list[tuple[float, float]] = field(default_factory=list)
    begins: list[float] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    start: float = math.inf
    """Time of the first device, at which the picture begins."""
    end: float = 0.0


def coded_picture(events: Iterable[Event], path: Path, *, title: str) -> None:
    """Draws devices, redundancy and objective of a coded run over time, as a PNG.

    Args:
      events: Events of the coordinator, in order.
      path: Path of the picture; its folder is created, and the file is written atomically.
      title: Title of the picture.

    Raises:
      DataError: there is nothing to draw, or an event is damaged.
      MissingExtra: matplotlib is not installed.
    """
    timeline = _course(events)
    if not timeline.devices:
        raise DataError(f"no picture for {path}: no device has joined")
    height = min(9.0, max(1.6, 0.28 * len(timeline.devices)))
    with picture(path, (12, 6.4 + height), title) as figure:
        devices, redundancy, objective = figure.subplots(3, 1, sharex=True, height_ratios=[height, 1.4, 2.4])
        _draw_devices(devices, timeline)
        _draw_redundancy(redundancy, timeline)
        _draw_objective(objective, timeline)
        for axes in (devices, redundancy, objective):
            for begin in timeline.begins[1:]:
                axes.axvline(begin, color=INK, linestyle=":", linewidth=1)
        ticks(objective.xaxis, 8)
        objective.set_xlabel(time_label(simulated=False))
        objective.set_xlim(timeline.start, timeline.start + (1.02 * (timeline.end - timeline.start) or 1.0))


# --- from events to figures -------------------------------------------------------------------------------------


def _course(events: Iterable[Event]) -> _Course:
    timeline, members, session_start_s, pause_start_s = _Course(), dict[int, _Device](), 0.0, None
    for event in events:
        kind = event.get("event")
        if kind == "begins":
            for device in members.values():
                device.becomes(timeline.end, gone=True)
                device.asked = True  # the events do not include its end
            members, session_start_s, pause_start_s = {}, timeline.end, None
            timeline.begins.append(session_start_s)
        t = timeline.end = session_start_s + number(event, "t")
        if kind == "iterate":
            timeline.objectives.append((t, number(event, "objective")))
        elif kind == "paused":
            pause_start_s = t
        elif kind == "goes_on" and pause_start_s is not None:
            timeline.pauses.append((pause_start_s, t))
            pause_start_s = None
        _take(timeline, members, event, t)
        levels = event.get("redundancy")
        if isinstance(levels, list):
            timeline.redundancy.append(
                (t, [number({"level": level}, "level", "a redundancy") for level in levels])
            )
    for device in members.values():
        device.becomes(timeline.end, gone=True)
        device.gone = False
    if pause_start_s is not None:
        timeline.pauses.append((pause_start_s, timeline.end))
    return timeline


def _take(course: _Course, there: dict[int, _Device], event: Event, t: float) -> None:
    kind = event.get("event")
    if kind in ("encoded", "iterate"):
        for device in there.values():
            device.joined |= not device.making
            device.becomes(t)
        return
    if "rank" not in event:
        return
    rank = int(number(event, "rank"))
    if kind == "came":
        there[rank] = _Device(since=t)
        course.start = min(course.start, t)
        course.devices.append((rank, there[rank]))
    if rank not in there:
        return
    device = there[rank]
    if kind == "ordered":
        device.making.add(int(number(event, "block")))
    elif kind in ("built", "failed"):
        device.making.discard(int(number(event, "block")))
    elif kind in ("silent", "heard"):
        device.silent = kind == "silent"
    elif kind == "leaving":
        device.asked = True
    device.becomes(t, gone=kind == "gone")
    if kind == "gone":
        del there[rank]


# --- drawing ----------------------------------------------------------------------------------------------------


def _draw_devices(axes: Axes, course: _Course) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    for y, (_, device) in enumerate(course.devices):
        for begin, end, state in device.spans:
            axes.barh(y, end - begin, left=begin, height=0.7, color=STATES[state])
        if device.vanished:
            axes.plot([device.since], [y], color=VERMILLION, marker="X", markersize=8, linestyle="")
    states = {state for _, device in course.devices for _, _, state in device.spans}
    handles: list[Patch | Line2D] = [Patch(color=STATES[key], label=key) for key in STATES if key in states]
    if any(device.vanished for _, device in course.devices):
        handles.append(Line2D([], [], color=VERMILLION, marker="X", linestyle="", label="vanishes"))
    name_rows(axes, [str(rank) for rank, _ in course.devices], MOST_NAMED)
    axes.set_title("Devices")
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles))


def _draw_redundancy(axes: Axes, course: _Course) -> None:
    axes.set(title="How many devices may vanish", ylabel="devices")
    for place, (kind, (colour, line)) in enumerate(KINDS.items()):
        points = [(t, levels[place]) for t, levels in course.redundancy if len(levels) > place]
        if points:
            points.append((course.end, points[-1][1]))
            axes.step(
                *zip(*points, strict=True), where="post", color=colour, linestyle=line, linewidth=2,
                label=f"{kind}",
            )  # fmt: skip
    for begin, end in course.pauses:
        axes.axvspan(begin, end, color=VERMILLION, alpha=0.15, linewidth=0)
    if course.redundancy:
        axes.legend(title="products by", loc="best")
    axes.axhline(0, color=VERMILLION, linewidth=0.8)
    ticks(axes.yaxis, 4, whole=True)
    axes.set_ylim(bottom=-1.2)


def _draw_objective(axes: Axes, course: _Course) -> None:
    axes.set(title="Objective above that of the last iterate", ylabel="relative difference")
    if len(course.objectives) < 2:
        say(axes, "fewer than two iterates")
        return
    last = course.objectives[-1][1]
    differences = [(t, abs(value - last) / (abs(last) or 1.0)) for t, value in course.objectives]
    points = [(t, difference) for t, difference in differences if difference > 0]
    axes.plot(*zip(*points, strict=True), color=BLUE, linewidth=1.4, marker="o", markersize=3)
    axes.set_yscale("log")
