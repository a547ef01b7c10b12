"""Style of pictures, and helpers for their axes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from farflung.extras import require_modules
from farflung.files import wrap_write_errors, write_atomically

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

__all__ = ["create_picture", "draw_text", "format_time_label", "label_rows", "set_percent_ticks", "set_ticks"]

# Okabe and Ito's palette: told apart with every common colour blindness, and by lightness in print.
BLUE, VERMILLION, YELLOW, GREY, INK = "#0072B2", "#D55E00", "#F0E442", "#A6A6A6", "#222222"
GREEN, PURPLE = "#009E73", "#7A3E9D"
LIGHT_BLUE = "#BFDCEC"

STYLE: dict[str, object] = {
    "agg.path.chunksize": 10_000,  # Agg cannot draw long noisy lines at once
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
TICK_STEPS = [1, 2, 2.5, 5, 10]  # allowed distances of ticks


@contextmanager
def create_picture(
    path: Path, size: tuple[float, float], title: str = "", *, is_simulated: bool = False
) -> Iterator[Figure]:
    """Yields an empty figure in the common style, and writes it as a PNG if drawing raises no error.

    Args:
      path: Path of the PNG, which is written atomically; its folder is created.
      size: Width and height in inches.
      title: Title of the picture.
      is_simulated: Whether times are simulated, which the picture and the file's description then say.

    Raises:
      MissingExtra: matplotlib is not installed.
      StorageError: The file cannot be written.
    """
    require_modules("a picture", "matplotlib", extra="report")
    import matplotlib.style
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.transforms import ScaledTranslation

    with matplotlib.style.context(["default", STYLE]):
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        if title:
            heading = textwrap.fill(title, 90, max_lines=2, placeholder=" …")
            figure.suptitle(heading, x=0.012, ha="left", fontsize=14, fontweight="bold", parse_math=False)
        if is_simulated:
            mark = figure.text(
                1, 1, "SIMULATED: times are modelled", ha="right", va="top", fontsize=10, fontweight="bold",
                color="white", bbox={"boxstyle": "round,pad=0.4", "facecolor": PURPLE, "edgecolor": "none"},
                transform=figure.transFigure + ScaledTranslation(-0.21, -0.125, figure.dpi_scale_trans),
            )  # fmt: skip
            mark.set_in_layout(False)  # the panels keep their width
        yield figure
        with wrap_write_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Title": title, "Description": "simulated run" if is_simulated else "run"}
        write_atomically(
            path, lambda partial: figure.savefig(partial, format="png", dpi=DPI, metadata=metadata)
        )


def set_ticks(axis: Axis, max_ticks: int = 6, *, integer: bool = False) -> None:
    """Sets ticks at round numbers, integers if requested, with commas between thousands."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(max_ticks, steps=TICK_STEPS, integer=integer))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.12g}"))


def set_percent_ticks(axis: Axis) -> None:
    """Formats ticks from 0 to 1 as percent, without the sign."""
    from matplotlib.ticker import FuncFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.4g}"))


def label_rows(axes: Axes, names: Sequence[str], max_labels: int) -> None:
    """Labels the vertical axis with ranks, the first on top; with many ranks, only every k-th."""
    stride = math.ceil(len(names) / max_labels)
    axes.set_yticks(range(0, len(names), stride), names[::stride])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_ylabel("rank")
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def draw_text(axes: Axes, text: str) -> None:
    """Draws a text in the middle of an empty panel."""
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color="#777777")


def format_time_label(*, is_simulated: bool) -> str:
    """Returns the label of a time axis."""
    return "simulated time (s)" if is_simulated else "time (s)"
