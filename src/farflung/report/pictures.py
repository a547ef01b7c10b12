"""The style of pictures, and the parts that several share."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.extras import need
from farflung.files import write_whole, writing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["name_rows", "percent", "picture", "say", "ticks", "time_label"]

# Okabe and Ito's palette: told apart with every common colour blindness, and by lightness in print.
BLUE, VERMILLION, YELLOW, GREY, INK = "#0072B2", "#D55E00", "#F0E442", "#A6A6A6", "#222222"
GREEN, PURPLE = "#009E73", "#7A3E9D"
LIGHT_BLUE = "#BFDCEC"

STYLE: dict[str, object] = {
    "agg.path.chunksize": 10_000,  # long noisy lines are more than Agg takes at once
    "axes.axisbelow": True,
    "axes.edgecolor": "#888888",
    "axes.grid": True,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.titlesize": 11.5,
    "axes.titleweight": "bold",
    "font.size": 10.5,
    "grid.color": "#E4E4E4",
    "legend.fontsize": 9,
    "legend.frameon": False,
    "text.color": INK,
    "xtick.color": "#555555",
    "ytick.color": "#555555",
}
DPI = 120
ROUND = [1, 2, 2.5, 5, 10]  # what ticks may be apart


@contextmanager
def picture(
    path: Path, size: tuple[float, float], title: str = "", *, simulated: bool = False
) -> Iterator[Figure]:
    """Gives an empty figure in the style of all pictures, and writes it as a PNG where drawing raises no error.

    Args:
      path: the PNG; its folder is made, and it appears whole or not at all.
      size: width and height in inches.
      title: stands above the picture.
      simulated: marked in the picture, and said in the file's description.

    Raises:
      MissingExtra: matplotlib is not installed.
      StorageError: it cannot be written.
    """
    need("a picture", "matplotlib", extra="report")
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.transforms import ScaledTranslation

    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        if title:
            head = textwrap.fill(title, 90, max_lines=2, placeholder=" …")
            figure.suptitle(head, x=0.012, ha="left", fontsize=14, fontweight="bold", parse_math=False)
        if simulated:
            mark = figure.text(
                1, 1, "SIMULATED: times are modelled", ha="right", va="top", fontsize=10, fontweight="bold",
                color="white", bbox={"boxstyle": "round,pad=0.4", "facecolor": PURPLE, "edgecolor": "none"},
                transform=figure.transFigure + ScaledTranslation(-0.21, -0.125, figure.dpi_scale_trans),
            )  # fmt: skip
            mark.set_in_layout(False)  # the panels keep their width
        yield figure
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        about = {"Title": title, "Description": "simulated run" if simulated else "run"}
        write_whole(path, lambda partial: figure.savefig(partial, format="png", dpi=DPI, metadata=about))


def ticks(axis: Axis, most: int = 6, *, whole: bool = False) -> None:
    """Sets ticks at round numbers, whole ones if asked for, with commas between thousands."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(most, steps=ROUND, integer=whole))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))


def percent(axis: Axis) -> None:
    """Labels ticks from 0 to 1 as percent."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}"))


def name_rows(axes: Axes, names: Sequence[str], most: int) -> None:
    """Makes the vertical axis one of rows, the first on top; with more than ``most`` some go without their name."""
    every = math.ceil(len(names) / most)
    axes.set_yticks(range(0, len(names), every), names[::every])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_ylabel("rank")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def say(axes: Axes, words: str) -> None:
    """Prints words in the middle of a panel that has nothing to show."""
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color="#777777")


def time_label(*, simulated: bool) -> str:
    """Names an axis of time."""
    return "simulated time (s)" if simulated else "time (s)"
