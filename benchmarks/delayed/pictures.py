"""A picture of what a delay costs: by the length of a training, and in other trainings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy

from benchmarks.common.pictures import create_drawing

__all__ = ["draw"]

LOOKS = {
    "delay 5": {"color": "#1f77b4", "linestyle": "--"},
    "delay 20": {"color": "#1f77b4"},
    "delay 5, swap": {"color": "#d62728", "linestyle": "--"},
    "delay 20, swap": {"color": "#d62728"},
}


IMAGENET_STEPS = 75_000
"""120 epochs of 1.28 million samples on 64 GPUs (the DTS poster's), at 32 samples a GPU, which is our assumption."""


def draw(
    path: Path,
    by_steps: Mapping[int, Mapping[str, Any]],
    others: Mapping[str, Mapping[str, Any]],
    law: Callable[[Any, Any], Any],
    published: Sequence[float],
) -> None:
    """Points lost to synchronous SGD.

    Args:
      path: of the picture.
      by_steps: trainings with ``lost`` by method, by their number of steps.
      others: trainings by name.
      law: points lost, of a delay and steps.
      published: points lost on ImageNet by delays of 4 to 20.
    """
    with create_drawing(path, (10, 4)) as figure:
        left, right = figure.subplots(1, 2, sharey=True)
        for name, look in LOOKS.items():
            found = {steps: one["lost"][name] for steps, one in by_steps.items() if name in one["lost"]}
            left.plot(list(found), list(found.values()), marker="o", label=name, **look)
        steps = numpy.geomspace(min(by_steps), 1.3 * IMAGENET_STEPS)
        for delay in (5, 20):
            look = LOOKS[f"delay {delay}"] | {"color": "#888888"}
            left.plot(steps, law(delay, steps), linewidth=1, label=f"law, delay {delay}", **look)
        left.plot(
            [IMAGENET_STEPS] * len(published), published, "x", color="black",
            label="ImageNet, delays 4 to 20 (DTS poster)",
        )  # fmt: skip
        left.set(xscale="log", xlabel="steps", ylabel="points lost to synchronous SGD")
        ticks = [*by_steps, IMAGENET_STEPS]
        left.set_xticks(ticks, [f"{steps:,}" for steps in ticks], minor=False)
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
