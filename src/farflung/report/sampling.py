"""A picture of how samples are scored: the scores, what batches by them are worth, groups, and how ranks move."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from farflung.report.pictures import (
    BLUE,
    GREEN,
    GREY,
    LIGHT_BLUE,
    RAW_AT_LEAST,
    VERMILLION,
    picture,
    say,
    smooth,
    ticks,
)
from farflung.report.reading import number
from farflung.telemetry import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

__all__ = ["sampling_picture"]

Steps: TypeAlias = "dict[int, list[float]]"
"""By step, a value of each replica."""

QUANTILES = 5
"""Of the scores, told at each step: the lowest and the highest, the quarters, and the middle."""


def sampling_picture(
    events_by_rank: Mapping[int, Iterable[Event]], path: Path, *, title: str, simulated: bool
) -> bool:
    """Draws the scores of samples and what is made of them, over steps; lines are means over the replicas.

    Args:
      events_by_rank: the events of each replica, in the order they were emitted.
      path: the picture; its folder is made, and it appears whole or not at all.
      title: stands above the picture.
      simulated: marks the picture as simulated.

    Returns:
      Whether there was anything to draw: no step of a run whose sampler scores nothing tells of scores.

    Raises:
      DataError: an event is damaged.
      MissingExtra: matplotlib is not installed.
    """
    steps = {rank: _scored(events_by_rank[rank]) for rank in sorted(events_by_rank)}
    if not any(steps.values()):
        return False

    def values(name: str, at: int | None = None) -> Steps:
        found: Steps = {}
        for rank, events in steps.items():
            for step, event in events.items():
                value = event.get(name)
                if value is None:
                    continue
                if at is not None:
                    value = value[at] if isinstance(value, list) and len(value) == QUANTILES else None
                found.setdefault(step, []).append(number({**event, name: value}, name, f"rank {rank}"))
        return dict(sorted(found.items()))

    with picture(path, (13, 7.6), title, simulated=simulated) as figure:
        (scores, worth), (groups, ranks) = figure.subplots(2, 2, sharex=True)
        _draw_scores(scores, [values("score_quantiles", at) for at in range(QUANTILES)])
        worth.set(title="Batches by scores over uniform ones", ylabel="factor")
        _line(worth, values("variance_ratio"), BLUE, "second moment of the gradient, by scores")
        if gains := values("gain"):
            _line(worth, gains, GREEN, "gain in steps, predicted")
        worth.axhline(1.0, color=GREY, linewidth=1, linestyle="--", label="uniform batches")
        _draw_groups(groups, values("scored"), values("groups"))
        _draw_ranks(ranks, [values("rank_within_5"), values("rank_within_10")], values("score_age"))
        for axes in (scores, worth):
            axes.legend()
        for axes in (groups, ranks):
            axes.set_xlabel("step")
    return True


def _scored(events: Iterable[Event]) -> dict[int, Event]:
    """The steps that tell of scores; of one that was done again, what was told last."""
    found: dict[int, Event] = {}
    for event in events:
        step = event.get("step")
        if not isinstance(step, int):
            continue
        if event["event"] == "begin":
            found = {at: each for at, each in found.items() if at < step}
        elif event["event"] == "step" and "variance_ratio" in event and event.get("scored"):
            found[step] = event
    return found


def _means(values: Steps) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Steps, and the mean over replicas at each; with many, the moving mean over steps."""
    steps = np.array([*values], dtype=float)
    means = np.array([np.mean(each) for each in values.values()], dtype=float)
    return steps, means if len(means) < RAW_AT_LEAST else smooth(means, max(2, len(means) // 50))


def _line(axes: Axes, values: Steps, colour: str, label: str) -> None:
    axes.plot(*_means(values), color=colour, linewidth=1.8, label=label)


def _draw_scores(axes: Axes, quantiles: list[Steps]) -> None:
    axes.set(title="Scores of the newest group", ylabel="score")
    (steps, lowest), (_, low), (_, middle), (_, high), (_, highest) = map(_means, quantiles)
    axes.fill_between(steps, lowest, highest, color=LIGHT_BLUE, linewidth=0, alpha=0.6, label="5 to 95 %")
    axes.fill_between(steps, low, high, color=BLUE, linewidth=0, alpha=0.4, label="25 to 75 %")
    axes.plot(steps, middle, color=BLUE, linewidth=2, label="median")
    axes.set_ylim(bottom=0)
    ticks(axes.xaxis, whole=True)


def _draw_groups(axes: Axes, sizes: Steps, numbers: Steps) -> None:
    axes.set(title="Groups", ylabel="samples in the newest")
    _line(axes, sizes, BLUE, "samples in the newest")
    _line_beside(axes, "groups", numbers, VERMILLION, "groups")


def _draw_ranks(axes: Axes, shares: list[Steps], ages: Steps) -> None:
    axes.set(title="Ranks since the scores before", ylabel="share of samples (%)")
    if not ages:
        say(axes, "no sample was scored anew yet")
        return
    for within, values, colour in zip((5, 10), shares, (BLUE, GREEN), strict=True):
        percent = {step: [100 * share for share in each] for step, each in values.items()}
        _line(axes, percent, colour, f"moved by less than {within} %")
    axes.set_ylim(0, 104)
    _line_beside(axes, "age of the scores before, in steps", ages, GREY, "age of the scores before")


def _line_beside(axes: Axes, ylabel: str, values: Steps, colour: str, label: str) -> None:
    """Draws a line on an axis of its own on the right, and one legend; values on both axes begin at 0."""
    beside = axes.twinx()
    beside.set_ylabel(ylabel)
    beside.grid(visible=False)
    _line(beside, values, colour, label)
    axes.set_ylim(bottom=0)
    beside.set_ylim(bottom=0)
    lines = [*axes.lines, *beside.lines]
    beside.legend(lines, [str(line.get_label()) for line in lines], loc="lower right")
