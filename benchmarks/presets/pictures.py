"""Pictures of all methods: loss over steps and over bytes, and how far each is above the reference at two lengths."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from pathlib import Path

from benchmarks.common.pictures import create_drawing
from benchmarks.presets.courses import Course
from benchmarks.presets.methods import REFERENCE

__all__ = ["draw"]

HIGHEST = 1.0
"""Loss above the reference's last one that is shown."""


def draw(folder: Path, courses: Mapping[str, Course], target: float) -> None:
    """Draw ``presets_bytes.svg``.

    Args:
      folder: takes it.
      courses: by method.
      target: a loss to mark.
    """
    lowest = courses[REFERENCE].loss
    with create_drawing(folder / "presets_bytes.svg", (13, 5)) as figure:
        by_steps, by_bytes = figure.subplots(1, 2, sharey=True)
        for number, (method, course) in enumerate(courses.items()):
            points = list(zip(*course.curves, strict=True))
            losses = [statistics.fmean(point[1] for point in same) for same in points]
            looks = {
                "color": "#000000" if method == REFERENCE else f"C{(number - 1) % 10}",
                "linestyle": "--" if number > 5 else "-",
                "linewidth": 1.4,
                "label": method,
            }
            by_steps.plot([same[0][0] for same in points], losses, **looks)
            by_bytes.plot([max(same[0][2], 1) / 1e6 for same in points], losses, **looks)
        by_steps.set(xlabel="steps", ylabel="test loss", ylim=(lowest - 0.05, lowest + HIGHEST))
        by_bytes.set(xlabel="MB that each replica sent", xscale="log")
        for axes in (by_steps, by_bytes):
            axes.axhline(target, color="#888888", linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        figure.legend(*by_steps.get_legend_handles_labels(), loc="outside right upper")
