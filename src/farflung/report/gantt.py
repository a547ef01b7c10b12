"""What replicas do and what is under way meanwhile, as bars over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.errors import DataError
from farflung.report.pictures import BLUE, COLOURS, GREEN, GREY, VERMILLION, YELLOW, picture
from farflung.telemetry import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["gantt_picture"]

MOST_RANKS = 8
"""With more replicas than this the picture shows the first ones."""
SHADES = (YELLOW, "#E69F00", "#56B4E9", "#009E73", "#CC79A7")
"""Exchanges of successive steps, so that those that overlap are told apart."""


def gantt_picture(
    events_by_rank: Mapping[int, Iterable[Event]], path: Path, *, title: str, simulated: bool
) -> None:
    """Draws steps, waits and exchanges of a run as a PNG.

    Args:
      events_by_rank: of each replica, with the ``step`` and ``exchange`` events of a traced run.
      path: the picture; its folder is made, and it appears whole or not at all.
      title: stands above it.
      simulated: marks it as simulated.

    Raises:
      DataError: there is no step to draw.
      MissingExtra: matplotlib is not installed.
    """
    events = {rank: list(events_by_rank[rank]) for rank in sorted(events_by_rank)[:MOST_RANKS]}
    if not any(event["event"] == "step" for told in events.values() for event in told):
        raise DataError(f"no picture for {path}: the run's events hold no step")
    with picture(path, (14, 2.2 + 0.95 * len(events)), title, simulated=simulated) as figure:
        _draw(figure, events, simulated)


def _draw(figure: Figure, events: Mapping[int, list[Event]], simulated: bool) -> None:
    from matplotlib.patches import Patch

    axes = figure.subplots()
    for place, told in enumerate(events.values()):
        _draw_steps(axes, place - 0.17, told)
        _draw_exchanges(axes, place + 0.06, told)
    axes.set_yticks(range(len(events)), [f"rank {rank}" for rank in events])
    axes.set_ylim(len(events) - 0.45, -0.55)
    axes.set_xlabel("simulated time (s)" if simulated else "time (s)")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)
    figure.legend(
        handles=[
            Patch(color=BLUE, label="computes, with the step's number"),
            Patch(color=VERMILLION, label="waits for an exchange"),
            *([Patch(color=COLOURS["scoring"], label="scores samples")] if _scores(events) else []),
            *([Patch(color=GREEN, label="evaluates or saves")] if _aside(events) else []),
            Patch(facecolor=SHADES[0], label="exchange under way, numbered by the step it started at"),
        ],
        loc="outside lower center",
        ncols=4,
    )


def _scores(events: Mapping[int, list[Event]]) -> bool:
    """Whether samples were scored."""
    return any("scoring_s" in event for told in events.values() for event in told)


def _aside(events: Mapping[int, list[Event]]) -> bool:
    """Whether evaluations or checkpoints took any time."""
    return any(_took(event) for told in events.values() for event in told)


def _took(event: Event) -> float:
    """Seconds of an evaluation or a checkpoint; 0 for anything else."""
    return _seconds(event, "duration_s") if event["event"] in ("evaluation", "checkpoint") else 0.0


def _draw_steps(axes: Axes, y: float, told: Iterable[Event]) -> None:
    for event in told:
        if took := _took(event):
            axes.barh(y, took, left=_seconds(event, "t") - took, height=0.3, color=COLOURS["evaluation"])
        if event["event"] != "step":
            continue
        end, length = _seconds(event, "t"), _seconds(event, "duration_s")
        begin = end - length + _seconds(event, "data_s")
        compute, waited = _seconds(event, "compute_s"), _seconds(event, "exposed_s")
        axes.barh(
            y, compute, left=begin, height=0.3, color=COLOURS["compute"], edgecolor="white", linewidth=0.6
        )
        scoring = _seconds({"scoring_s": 0.0, **event}, "scoring_s")
        axes.barh(y, scoring, left=begin + compute, height=0.3, color=COLOURS["scoring"])
        waits = begin + compute + scoring
        axes.barh(y, waited, left=waits, height=0.3, color=COLOURS["exposed_communication"])
        axes.text(
            begin + compute / 2, y, str(event["step"]), ha="center", va="center", color="white",
            fontsize=8, clip_on=True,
        )  # fmt: skip


def _draw_exchanges(axes: Axes, y: float, told: Iterable[Event]) -> None:
    """One below the other where they overlap."""
    exchanges: dict[int, tuple[float, float]] = {}
    for event in told:
        if event["event"] == "exchange":
            step = int(_seconds(event, "step"))
            began, ended = _seconds(event, "began_s"), _seconds(event, "t")
            first, last = exchanges.get(step, (began, ended))
            exchanges[step] = min(first, began), max(last, ended)
    lanes: list[float] = []
    placed: list[tuple[int, int, float, float]] = []
    for step, (began, ended) in sorted(exchanges.items()):
        lane = next((at for at, free in enumerate(lanes) if free <= began), len(lanes))
        lanes[lane : lane + 1] = [ended]
        placed.append((lane, step, began, ended))
    height = 0.4 / max(1, len(lanes))
    for lane, step, began, ended in placed:
        middle = y + height * (lane + 0.5)
        colour = SHADES[step % len(SHADES)]
        axes.barh(
            middle,
            ended - began,
            left=began,
            height=height * 0.9,
            color=colour,
            edgecolor=GREY,
            linewidth=0.4,
        )
        if height > 0.1:
            axes.text(
                (began + ended) / 2, middle, str(step), ha="center", va="center", fontsize=7, clip_on=True
            )


def _seconds(event: Event, name: str) -> float:
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"no number {name} in an event ({event.get('event')}); the events are damaged")
    return float(value)
