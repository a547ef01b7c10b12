"""Runs the comparison of the README and draws it: ``python -m benchmarks.front``."""

from __future__ import annotations

import sys
from pathlib import Path

import farflung
from benchmarks.common.pictures import create_drawing
from benchmarks.common.provenance import ROOT
from farflung.report.pictures import set_percent_ticks
from farflung.runs import Comparison

PICTURE = ROOT / "docs" / "compare.svg"
LABELS = {
    "synchronous": ("32 bits", "#888888", "o"),
    "synchronous(codec=int8)": ("8 bits", "#0072B2", "s"),
    "synchronous(codec=error_feedback(topk(density=0.01)))": ("1 % Top-k", "#D55E00", "D"),
}
NETWORK, TARGET = "wifi-10mbps", 0.75


def draw(comparison: Comparison, path: Path) -> None:
    """Draws accuracy over simulated time and over bytes that rank 0 sent."""
    with create_drawing(path, (9, 3.6)) as figure:
        over_time, over_bytes = figure.subplots(1, 2, sharey=True)
        for course in comparison.courses:
            label, color, marker = LABELS[course.recipe]
            seconds, nbytes, scores = zip(*course.scores, strict=True)
            look = {"color": color, "marker": marker, "markersize": 4.5, "linewidth": 2, "label": label}
            over_time.plot(seconds, scores, **look)
            over_bytes.plot([sent / 1e6 for sent in nbytes], scores, **look)
        over_time.set(xscale="log", xlabel="simulated time (s)", ylabel="test accuracy (%)")
        over_bytes.set(xscale="log", xlabel="sent by one replica (MB)")
        for axes in (over_time, over_bytes):
            axes.axhline(TARGET, color="#888888", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
            axes.xaxis.set_major_formatter("{x:g}")
            set_percent_ticks(axes.yaxis)
        over_bytes.legend(loc="lower right")


def main() -> int:
    """Draws the picture and prints the table; the exit code."""
    comparison = farflung.compare(
        [*LABELS], [NETWORK], workload="fashion-mnist/mlp", data="packaged", steps=100, target=TARGET
    )
    print(comparison)
    draw(comparison, PICTURE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
