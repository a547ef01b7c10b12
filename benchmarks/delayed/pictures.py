"""A picture of what a delay costs: by the length of a training, and in other trainings."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from farflung.report.pictures import picture

__all__ = ["draw"]

LOOKS = {
    "delay 5": {"color": "#1f77b4", "linestyle": "--"},
    "delay 20": {"color": "#1f77b4"},
    "delay 5, swap": {"color": "#d62728", "linestyle": "--"},
    "delay 20, swap": {"color": "#d62728"},
}


def draw(
    path: Path, by_steps: Mapping[int, Mapping[str, Any]], others: Mapping[str, Mapping[str, Any]]
) -> None:
    """Points lost to synchronous SGD.

    Args:
      path: of the picture.
      by_steps: trainings with ``lost`` by method, by their number of steps.
      others: trainings by name.
    """
    with picture(path, (10, 4)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for name, look in LOOKS.items():
            found = {steps: one["lost"][name] for steps, one in by_steps.items() if name in one["lost"]}
            left.plot(list(found), list(found.values()), marker="o", label=name, **look)
        left.set(xscale="log", xlabel="steps", ylabel="points lost to synchronous SGD")
        left.set_xticks(list(by_steps), [f"{steps:,}" for steps in by_steps], minor=False)
        left.minorticks_off()
        left.set_title("Fashion-MNIST, momentum 0.9")
        left.legend()
        for place, one in enumerate(others.values()):
            for shift, name in ((-0.15, "delay 20"), (0.15, "delay 20, swap")):
                right.bar(place + shift, one["lost"][name], width=0.28, color=LOOKS[name]["color"])
        right.set_xticks(
            range(len(others)), [f"{name}\n{one['trial']['steps']:,} steps" for name, one in others.items()]
        )
        right.set_title("In other trainings, delay 20")
        for axes in (left, right):
            axes.axhline(0, color="#888888", linewidth=0.8)
