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
    create_picture,
    draw_text,
    format_time_label,
    label_rows,
    set_ticks,
)
from farflung.telemetry import Event, read_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw_coded_picture"]

STATE_COLORS = {"joins": LIGHT_BLUE, "encodes": YELLOW, "takes part": BLUE, "silent": GREY}
"""Colour of each state of a device."""
MAX_LABELS = 30
"""Maximum number of devices that are all labelled with their rank."""
KIND_STYLES = {"rows": (BLUE, "-"), "columns": (GREEN, "--")}


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
    is_gone: bool = False
    has_asked: bool = False
    state_start_s: float = 0.0
    state: str = "joins"
    is_silent: bool = False
    has_joined: bool = False
    pending_blocks: set[int] = field(default_factory=set)

    @property
    def has_vanished(self) -> bool:
        return self.is_gone and not self.has_asked

    def update_state(self, t: float, *, is_gone: bool = False) -> None:
        """Ends a span if the state has changed."""
        state = "takes part" if self.has_joined else "joins"
        state = "silent" if self.is_silent else "encodes" if self.pending_blocks else state
        if is_gone or state != self.state:
            if t > self.state_start_s:
                self.spans.append((self.state_start_s, t, self.state))
            self.state_start_s, self.state = t, state
        self.is_gone = is_gone


@dataclass(slots=True)
class _Timeline:
    """A run over time, with sessions one after the other."""

    devices: list[tuple[int, _Device]] = field(default_factory=list)
    redundancy: list[tuple[float, list[float]]] = field(default_factory=list)
    objectives: list[tuple[float, float]] = field(default_factory=list)
    session_starts_s: list[float] = field(default_factory=list)
    pauses: list[tuple[float, float]] = field(default_factory=list)
    start_s: float = math.inf
    """Time of the first device, at which the picture begins."""
    end_s: float = 0.0


def draw_coded_picture(events: Iterable[Event], path: Path, *, title: str) -> None:
    """Draws devices, redundancy and objective of a coded run over time, as a PNG.

    Args:
      events: Events of the coordinator, in order.
      path: Path of the picture; its folder is created, and the file is written atomically.
      title: Title of the picture.

    Raises:
      DataError: there is nothing to draw, or an event is damaged.
      MissingExtra: matplotlib is not installed.
    """
    timeline = _build_timeline(events)
    if not timeline.devices:
        raise DataError(f"no picture for {path}: no device has joined")
    height = min(9.0, max(1.6, 0.28 * len(timeline.devices)))
    with create_picture(path, (12, 6.4 + height), title) as figure:
        devices, redundancy, objective = figure.subplots(3, 1, sharex=True, height_ratios=[height, 1.4, 2.4])
        _draw_devices(devices, timeline)
        _draw_redundancy(redundancy, timeline)
        _draw_objective(objective, timeline)
        for axes in (devices, redundancy, objective):
            for begin in timeline.session_starts_s[1:]:
                axes.axvline(begin, color=INK, linestyle=":", linewidth=1)
        set_ticks(objective.xaxis, 8)
        objective.set_xlabel(format_time_label(is_simulated=False))
        objective.set_xlim(
            timeline.start_s, timeline.start_s + (1.02 * (timeline.end_s - timeline.start_s) or 1.0)
        )


# --- from events to figures -------------------------------------------------------------------------------------


def _build_timeline(events: Iterable[Event]) -> _Timeline:
    timeline, members, session_start_s, pause_start_s = _Timeline(), dict[int, _Device](), 0.0, None
    for event in events:
        kind = event.get("event")
        if kind == "begins":
            for device in members.values():
                device.update_state(timeline.end_s, is_gone=True)
                device.has_asked = True  # the events do not include its end
            members, session_start_s, pause_start_s = {}, timeline.end_s, None
            timeline.session_starts_s.append(session_start_s)
        t = timeline.end_s = session_start_s + read_number(event, "t")
        if kind == "iterate":
            timeline.objectives.append((t, read_number(event, "objective")))
        elif kind == "paused":
            pause_start_s = t
        elif kind == "goes_on" and pause_start_s is not None:
            timeline.pauses.append((pause_start_s, t))
            pause_start_s = None
        _apply_event(timeline, members, event, t)
        levels = event.get("redundancy")
        if isinstance(levels, list):
            timeline.redundancy.append(
                (t, [read_number({"level": level}, "level", "a redundancy") for level in levels])
            )
    for device in members.values():
        device.update_state(timeline.end_s, is_gone=True)
        device.is_gone = False
    if pause_start_s is not None:
        timeline.pauses.append((pause_start_s, timeline.end_s))
    return timeline


def _apply_event(timeline: _Timeline, members: dict[int, _Device], event: Event, t: float) -> None:
    kind = event.get("event")
    if kind in ("encoded", "iterate"):
        for device in members.values():
            device.has_joined |= not device.pending_blocks
            device.update_state(t)
        return
    if "rank" not in event:
        return
    rank = int(read_number(event, "rank"))
    if kind == "came":
        members[rank] = _Device(state_start_s=t)
        timeline.start_s = min(timeline.start_s, t)
        timeline.devices.append((rank, members[rank]))
    if rank not in members:
        return
    device = members[rank]
    if kind == "ordered":
        device.pending_blocks.add(int(read_number(event, "block")))
    elif kind in ("built", "failed"):
        device.pending_blocks.discard(int(read_number(event, "block")))
    elif kind in ("silent", "heard"):
        device.is_silent = kind == "silent"
    elif kind == "leaving":
        device.has_asked = True
    device.update_state(t, is_gone=kind == "gone")
    if kind == "gone":
        del members[rank]


# --- drawing ----------------------------------------------------------------------------------------------------


def _draw_devices(axes: Axes, timeline: _Timeline) -> None:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    for y, (_, device) in enumerate(timeline.devices):
        for begin, end, state in device.spans:
            axes.barh(y, end - begin, left=begin, height=0.7, color=STATE_COLORS[state])
        if device.has_vanished:
            axes.plot([device.state_start_s], [y], color=VERMILLION, marker="X", markersize=8, linestyle="")
    states = {state for _, device in timeline.devices for _, _, state in device.spans}
    handles: list[Patch | Line2D] = [
        Patch(color=STATE_COLORS[key], label=key) for key in STATE_COLORS if key in states
    ]
    if any(device.has_vanished for _, device in timeline.devices):
        handles.append(Line2D([], [], color=VERMILLION, marker="X", linestyle="", label="vanishes"))
    label_rows(axes, [str(rank) for rank, _ in timeline.devices], MAX_LABELS)
    axes.set_title("Devices")
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=len(handles))


def _draw_redundancy(axes: Axes, timeline: _Timeline) -> None:
    axes.set(title="How many devices may vanish", ylabel="devices")
    for place, (kind, (colour, line)) in enumerate(KIND_STYLES.items()):
        points = [(t, levels[place]) for t, levels in timeline.redundancy if len(levels) > place]
        if points:
            points.append((timeline.end_s, points[-1][1]))
            axes.step(
                *zip(*points, strict=True), where="post", color=colour, linestyle=line, linewidth=2,
                label=f"{kind}",
            )  # fmt: skip
    for begin, end in timeline.pauses:
        axes.axvspan(begin, end, color=VERMILLION, alpha=0.15, linewidth=0)
    if timeline.redundancy:
        axes.legend(title="products by", loc="best")
    axes.axhline(0, color=VERMILLION, linewidth=0.8)
    set_ticks(axes.yaxis, 4, integer=True)
    axes.set_ylim(bottom=-1.2)


def _draw_objective(axes: Axes, timeline: _Timeline) -> None:
    axes.set(title="Objective above that of the last iterate", ylabel="relative difference")
    if len(timeline.objectives) < 2:
        draw_text(axes, "fewer than two iterates")
        return
    last = timeline.objectives[-1][1]
    differences = [(t, abs(value - last) / (abs(last) or 1.0)) for t, value in timeline.objectives]
    points = [(t, difference) for t, difference in differences if difference > 0]
    axes.plot(*zip(*points, strict=True), color=BLUE, linewidth=1.4, marker="o", markersize=3)
    axes.set_yscale("log")
