"""Pictures of all presets: loss against bytes, and against time on each network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.presets.courses import Course
from benchmarks.presets.methods import NETWORKS
from farflung.report.pictures import picture

__all__ = ["LOOKS", "draw"]

LOOKS: dict[str, dict[str, Any]] = {
    "synchronous": {"color": "#000000", "marker": "o"},
    "ring": {"color": "#999999", "marker": "o", "linestyle": "--"},
    "powersgd": {"color": "#7A3E9D", "marker": "s"},
    "pipe_sgd": {"color": "#E69F00", "marker": "v"},
    "delayed": {"color": "#D55E00", "marker": "v"},
    "dga": {"color": "#D55E00", "marker": "^", "linestyle": "--"},
    "local_sgd": {"color": "#009E73", "marker": "D"},
    "post_local_sgd": {"color": "#009E73", "marker": "P", "linestyle": "--"},
    "adacomm": {"color": "#009E73", "marker": "X", "linestyle": ":"},
    "diloco": {"color": "#0072B2", "marker": "D"},
    "streaming_diloco": {"color": "#0072B2", "marker": "P", "linestyle": "--"},
    "sparse_loco": {"color": "#56B4E9", "marker": "s"},
    "demo": {"color": "#CC79A7", "marker": "*"},
}
"""A colour for each kind of preset."""
HIGHEST = 2.6
"""Loss that is shown."""


def draw(folder: Path, courses: Sequence[Course], target: float) -> None:
    """``presets_bytes.png`` and ``presets_time.png``.

    Args:
      folder: takes them.
      courses: of all presets; one that has a training for each network is drawn for each.
      target: a loss to mark.
    """
    with picture(folder / "presets_bytes.png", (9, 5)) as figure:
        axes = figure.subplots()
        for course in courses:
            _line(axes, course, [point.sent / 1e6 for point in course.points])
        axes.set(xlabel="MB sent by all replicas", ylabel="validation loss")
        _finish(figure, [axes], target)
    with picture(folder / "presets_time.png", (14, 5)) as figure:
        places = figure.subplots(1, len(NETWORKS), sharey=True)
        for axes, network in zip(places, NETWORKS, strict=True):
            for course in courses:
                if network in course.networks:
                    _line(axes, course, [point.seconds[network] / 60 for point in course.points])
            axes.set(xlabel="simulated minutes")
            axes.set_title(network)
        places[0].set_ylabel("validation loss")
        _finish(figure, list(places), target)


def _line(axes: Axes, course: Course, along: Sequence[float]) -> None:
    axes.plot(
        along,
        [point.loss for point in course.points],
        linewidth=1.4,
        markersize=4,
        label=course.preset,
        **LOOKS[course.preset],
    )


def _finish(figure: Figure, places: Sequence[Axes], target: float) -> None:
    for axes in places:
        axes.axhline(target, color="#888888", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        axes.set(xscale="log", ylim=(target - 0.15, HIGHEST))
    lines, names = places[0].get_legend_handles_labels()
    once = dict(zip(names, lines, strict=True))
    figure.legend(list(once.values()), list(once), loc="outside right upper")
