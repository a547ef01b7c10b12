"""What replicas do and what is under way meanwhile, as bars over time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from farflung.errors import DataError
from farflung.report.pictures import COLOURS, GREY, YELLOW, name_rows, picture, time_label
from farflung.report.reading import number
from farflung.telemetry import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["gantt_picture"]

MOST_RANKS = 8
"""With more replicas than this the picture shows the first ones."""
MEANS = {
    "compute": "computes, with the step's number",
    "exposed_communication": "waits for an exchange",
    "scoring": "scores samples",
    "evaluation": "evaluates or saves",
}
"""Parts of the time that are drawn."""
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
        from matplotlib.patches import Patch

        axes = figure.subplots()
        for place, told in enumerate(events.values()):
            _draw_steps(axes, place - 0.17, told)
            _draw_exchanges(axes, place + 0.06, told)
        name_rows(axes, [f"rank {rank}" for rank in events], "")
        axes.set_xlabel(time_label(simulated=simulated))
        drawn = {bars.get_label() for bars in axes.containers}
        handles = [Patch(color=COLOURS[part], label=words) for part, words in MEANS.items() if words in drawn]
        handles.append(Patch(color=YELLOW, label="exchange under way, numbered by the step it started at"))
        figure.legend(handles=handles, loc="outside lower center", ncols=4)


def _draw_steps(axes: Axes, y: float, told: Iterable[Event]) -> None:
    for event in told:
        if event["event"] in ("evaluation", "checkpoint"):
            took = number(event, "duration_s")
            if took:
                _bar(axes, y, number(event, "t") - took, took, "evaluation")
        elif event["event"] == "step":
            begin = number(event, "t") - number(event, "duration_s") + number(event, "data_s")
            compute, waited = number(event, "compute_s"), number(event, "exposed_s")
            _bar(axes, y, begin, compute, "compute", edgecolor="white", linewidth=0.6)
            axes.text(
                begin + compute / 2, y, str(event["step"]), ha="center", va="center", color="white",
                fontsize=8, clip_on=True,
            )  # fmt: skip
            if "scoring_s" in event:
                _bar(axes, y, begin + compute, number(event, "scoring_s"), "scoring")
            scored = begin + compute + number({"scoring_s": 0.0, **event}, "scoring_s")
            _bar(axes, y, scored, waited, "exposed_communication")


def _bar(axes: Axes, y: float, begin: float, length: float, part: str, **look: Any) -> None:
    axes.barh(y, length, left=begin, height=0.3, color=COLOURS[part], label=MEANS[part], **look)


def _draw_exchanges(axes: Axes, y: float, told: Iterable[Event]) -> None:
    """Draws exchanges, one below the other where they overlap."""
    exchanges: dict[int, tuple[float, float]] = {}
    for event in told:
        if event["event"] == "exchange":
            step = int(number(event, "step"))
            began, ended = number(event, "began_s"), number(event, "t")
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
        axes.barh(
            middle, ended - began, left=began, height=height * 0.9, color=SHADES[step % len(SHADES)],
            edgecolor=GREY, linewidth=0.4,
        )  # fmt: skip
        if height > 0.1:
            axes.text(
                (began + ended) / 2, middle, str(step), ha="center", va="center", fontsize=7, clip_on=True
            )
