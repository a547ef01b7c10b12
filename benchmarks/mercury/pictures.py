"""A picture of the accuracy over steps and over time."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.common.pictures import create_drawing
from benchmarks.mercury.curves import Panel, smooth

__all__ = ["draw"]

COLOURS = ("#444444", "#4292c6", "#fd8d3c", "#d62728")
ALONG = {
    "steps": (1.0, "steps", "linear"),
    "seconds": (1000.0, "virtual time, 1,000 steps without an exchange", "log"),
}
"""Units, label and scale."""


def draw(path: Path, panels: Sequence[Panel]) -> None:
    """The smoothed accuracy of some methods, with the target as a dotted line.

    Args:
      path: of the picture.
      panels: side by side.
    """
    with create_drawing(path, (4.7 * len(panels), 4)) as figure:
        axes = figure.subplots(1, len(panels), squeeze=False)
        for axis, panel in zip(axes[0], panels, strict=True):
            unit, label, scale = ALONG[panel.along]
            for (name, points), colour in zip(panel.curves.items(), COLOURS, strict=False):
                accuracies = smooth([point.accuracy for point in points])
                axis.plot(
                    [getattr(point, panel.along) / unit for point in points],
                    accuracies,
                    label=name,
                    color=colour,
                )
            axis.axhline(panel.target.value, color="#888888", linewidth=0.8, linestyle=":")
            axis.set(title=panel.title, xlabel=label, xscale=scale)
            axis.legend(loc="lower right")
        axes[0][0].set_ylabel("test accuracy, %")
