"""Pictures of a window: how few directions there are, and what is left out behind it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator

from farflung.report.pictures import create_picture

__all__ = ["draw"]

USUAL = {"slice_size": 512, "ratio": 32.0, "variance_left": 0.0}
RATIOS = (2, 8, 32, 128, 512)
NAMES = {"slice_size": "K", "ratio": "K / d", "variance_left": "share of variance left"}


def draw(folder: Path, found: Mapping[str, Any]) -> None:
    """``spectra.png`` and ``window.png``.

    Args:
      folder: takes them.
      found: ``spectra`` by layer, and ``choices`` with their ratio and loss.
    """
    _spectra(folder / "spectra.png", found["spectra"])
    _choices(folder / "window.png", found["choices"])


def _spectra(path: Path, spectra: Sequence[Sequence[float]]) -> None:
    colours = colormaps["viridis"]
    with create_picture(path, (7, 4.2)) as figure:
        axes = figure.subplots()
        for number, shares in enumerate(spectra):
            axes.plot(
                range(1, len(shares) + 1),
                shares,
                color=colours(number / max(1, len(spectra) - 1)),
                linewidth=1,
                label={0: "first layer", len(spectra) - 1: "last layer"}.get(number),
            )
        axes.axhline(0.99, color="#888888", linewidth=0.8, linestyle="--")
        axes.set(xlabel="principal components", ylabel="share of variance explained", ylim=(0, 1.01))
        axes.set_title("A layer's first slice over a window of 100 steps")
        axes.legend(loc="lower right")


def _choices(path: Path, choices: Sequence[Mapping[str, Any]]) -> None:
    with create_picture(path, (11, 3.8)) as figure:
        places = figure.subplots(1, 3, sharex=True, sharey=True)
        for axes, setting in zip(places, USUAL, strict=True):
            along = [one for one in choices if _differs_in(one["choice"], setting)]
            _losses(axes, setting, sorted(along, key=lambda one: one["ratio"]))
        places[0].set_ylabel("left out, relative to the gradient")


def _differs_in(choice: Mapping[str, Any], setting: str) -> bool:
    usual = {**USUAL, "ratio": None} if setting == "variance_left" else USUAL
    return all(choice[name] == value for name, value in usual.items() if name != setting)


def _losses(axes: Axes, setting: str, along: Sequence[Mapping[str, Any]]) -> None:
    axes.plot([one["ratio"] for one in along], [one["loss"] for one in along], color="#0072B2", marker="o")
    along = sorted(along, key=lambda one: one["loss"], reverse=True) if (close := _close(along)) else along
    middle = (len(along) - 1) / 2
    for number, one in enumerate(along):
        value = one["choice"][setting]
        said = "all" if value is None else f"{value:g}"
        place = (14, 11 * (middle - number)) if close else (0, -18 if number % 2 else 9)
        axes.annotate(
            said, (one["ratio"], one["loss"]), textcoords="offset points", xytext=place, ha="center"
        )
    axes.set(xlabel="numbers over coefficients", xscale="log", xlim=(1.2, 700), ylim=(0, 1.05))
    axes.set_xticks(RATIOS, [str(ratio) for ratio in RATIOS])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_title(f"by {NAMES[setting]}")


def _close(along: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the points are above each other."""
    ratios = [one["ratio"] for one in along]
    return bool(max(ratios) < 1.1 * min(ratios))
