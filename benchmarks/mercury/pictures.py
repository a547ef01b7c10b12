"""A picture of the accuracy over steps and over time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt

from benchmarks.mercury.curves import Target, smooth
from benchmarks.mercury.watched import Point

__all__ = ["draw"]

COLOURS = ("#444444", "#4292c6", "#fd8d3c", "#d62728")


def draw(path: Path, curves: Mapping[str, Sequence[Point]], target: Target) -> None:
    """The smoothed accuracy of each method.

    Args:
      path: of the picture.
      curves: by method, in the times of the same links.
      target: the accuracy that times are taken at.
    """
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained", sharey=True)
    for (name, points), colour in zip(curves.items(), COLOURS, strict=True):
        accuracies = smooth([point.accuracy for point in points])
        axes[0].plot([point.steps for point in points], accuracies, label=name, color=colour)
        axes[1].plot([point.seconds / 1000 for point in points], accuracies, color=colour)
    for axis in axes:
        axis.axhline(target.value, color="#888888", linewidth=0.8, linestyle=":")
    axes[0].set(xlabel="steps", ylabel="test accuracy, %")
    axes[1].set(xlabel="virtual time, 1,000 steps without an exchange", xscale="log")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=120)
    plt.close(figure)
