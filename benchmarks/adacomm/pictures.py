"""A picture of the training loss over time, and of the steps between two exchanges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.adacomm.race import smooth
from benchmarks.adacomm.watched import Point
from benchmarks.common.pictures import create_drawing

__all__ = ["draw"]

COLOURS = ("#444444", "#9ecae1", "#4292c6", "#08519c", "#d62728")


def draw(path: Path, curves: Mapping[str, Sequence[Point]], target: float) -> None:
    """The smoothed loss of each method, and its blocks.

    Args:
      path: of the picture.
      curves: by method.
      target: the loss that times are taken at.
    """
    with create_drawing(path, (10, 4)) as figure:
        left, right = figure.subplots(1, 2, width_ratios=(3, 2), sharex=True)
        for (name, points), colour in zip(curves.items(), COLOURS, strict=True):
            seconds = [point.seconds / 1000 for point in points]
            left.plot(seconds, smooth(points), label=name, color=colour)
            right.plot(seconds, [point.block for point in points], color=colour, drawstyle="steps-post")
        left.axhline(target, color="#888888", linewidth=0.8, linestyle=":")
        left.set(xlabel="virtual time, 1,000 s", ylabel="training loss", yscale="log")
        left.legend()
        right.set(xlabel="virtual time, 1,000 s", ylabel="steps between two exchanges", yscale="log")
        for axes, format_ in ((left, "{x:.1f}"), (right, "{x:g}")):
            axes.yaxis.set_major_formatter(format_)
            axes.yaxis.set_minor_formatter(format_ if axes is left else "")
