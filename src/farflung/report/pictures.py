"""Pictures: one style and the parts that several share, and the picture of a run."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from farflung.errors import DataError
from farflung.extras import need
from farflung.files import write_whole, writing
from farflung.report.reading import PARTS_OF_TIME, SELDOM, number, rank_courses
from farflung.report.tables import score_words
from farflung.telemetry import Event

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

__all__ = ["name_rows", "percent", "picture", "run_picture", "say", "smooth", "ticks", "time_label"]

# Okabe and Ito's palette: told apart with every common colour blindness, and by lightness in print.
BLUE, VERMILLION, YELLOW, GREY, INK = "#0072B2", "#D55E00", "#F0E442", "#A6A6A6", "#222222"
GREEN, PURPLE = "#009E73", "#7A3E9D"
LIGHT_BLUE = "#BFDCEC"
COLOURS = {
    "compute": BLUE,
    "exposed_communication": VERMILLION,
    "data_wait": YELLOW,
    "scoring": PURPLE,
    "evaluation": GREEN,
    "other": GREY,
}
ON_DARK = {BLUE, VERMILLION, GREEN, PURPLE}

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
RAW_AT_LEAST = 30  # with fewer losses than this there is nothing to smooth
FEWEST_RANKS = 3  # room for so many bars is kept, so that a single one is not a wall
NAMED_RANKS = 16  # with more, some bars go without their rank and all without percentages


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


def name_rows(axes: Axes, names: Sequence[str], label: str = "rank", most: int = NAMED_RANKS) -> None:
    """Makes the vertical axis one of rows, the first on top; with more than ``most`` some go without their name."""
    every = math.ceil(len(names) / most)
    axes.set_yticks(range(0, len(names), every), names[::every])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_ylabel(label)
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def say(axes: Axes, words: str) -> None:
    """Prints words in the middle of a panel that has nothing to show."""
    axes.text(0.5, 0.5, words, transform=axes.transAxes, ha="center", va="center", color="#777777")


def time_label(*, simulated: bool) -> str:
    """Names an axis of time."""
    return "simulated time (s)" if simulated else "time (s)"


def smooth(values: NDArray[np.float64], half: int) -> NDArray[np.float64]:
    """Takes the mean over ``half`` values on either side; over fewer at the start, where losses fall fast."""
    at = np.arange(len(values))
    reach = np.clip(at, half // 10, half)
    start, stop = np.maximum(at - reach, 0), np.minimum(at + reach + 1, len(values))
    sums = np.concatenate(([0.0], np.cumsum(values)))
    means: NDArray[np.float64] = (sums[stop] - sums[start]) / (stop - start)
    return means


# --- the picture of a run ---------------------------------------------------------------------------------------


def run_picture(
    events_by_rank: Mapping[int, Iterable[Event]], path: Path, *, title: str, simulated: bool
) -> None:
    """Draws a run as a PNG: training loss over steps, test accuracy over time, and each replica's time.

    A run that was cut short is drawn as far as it came. In a run that was resumed, time goes on where it stopped and
    steps that were done again count once in the curves, but their time counts as time.

    Args:
      events_by_rank: the events of each replica, in the order they were emitted.
      path: the picture; its folder is made, and it appears whole or not at all.
      title: stands above the picture.
      simulated: marks the picture, and every axis of time in it, as simulated.

    Raises:
      DataError: there is nothing to draw, or an event is damaged.
      MissingExtra: matplotlib is not installed.
    """
    courses = rank_courses(events_by_rank)
    if not any(course.steps or course.evaluations for course in courses.values()):
        raise DataError(f"no picture for {path}: the run's events hold no step and no evaluation")
    # Losses and scores are equal on all replicas: those of the one that came farthest.
    steps = max((course.steps for course in courses.values()), key=len)
    evaluations = max((course.evaluations for course in courses.values()), key=len).values()
    losses = {
        at: number(event, "mean_loss")
        for at, (_, event) in steps.items()
        if event.get("mean_loss") is not None
    }
    height = min(8.0, max(4.6, 3.4 + 0.09 * len(courses)))
    with picture(path, (15, height), title, simulated=simulated) as figure:
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.08, wspace=0.03)  # type: ignore[union-attr, call-arg]
        left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.2])
        _draw_losses(left, losses)
        middle.set_xlabel(time_label(simulated=simulated))
        _draw_scores(middle, [(at, number(event, "accuracy")) for at, event in evaluations])
        right.set_xlabel(time_label(simulated=simulated))
        _draw_time(right, {rank: course.seconds for rank, course in courses.items()})


def _draw_losses(axes: Axes, losses: Mapping[int, float]) -> None:
    axes.set(title="Training loss", xlabel="step", ylabel="mean loss over all replicas")
    ticks(axes.xaxis, whole=True)
    finite = sorted((step, loss) for step, loss in losses.items() if math.isfinite(loss))
    if not finite:
        say(axes, "no losses yet")
        return
    steps, values = (np.array(column) for column in zip(*finite, strict=True))
    if len(values) < RAW_AT_LEAST:
        axes.plot(steps, values, color=BLUE, linewidth=1.8, marker="o", markersize=4)
        return
    half = max(2, len(values) // 50)
    axes.plot(steps, values, color=LIGHT_BLUE, linewidth=1, label="each step")
    axes.plot(steps, smooth(values, half), color=BLUE, linewidth=2, label=f"moving mean of {2 * half + 1:,}")
    axes.legend(loc="upper right")


def _draw_scores(axes: Axes, scores: Iterable[tuple[float, float]]) -> None:
    axes.set(title="Test accuracy", ylabel="accuracy on the test set (%)")
    finite = [(t, score) for t, score in scores if math.isfinite(score)]
    if not finite:
        say(axes, "not evaluated yet")
        return
    times, values = (np.array(column) for column in zip(*finite, strict=True))
    axes.plot(times, values, color=VERMILLION, linewidth=2, marker="o", markersize=5)
    axes.set_xlim(0, float(times.max()) * 1.08 or 1.0)
    ticks(axes.xaxis)
    if values.min() >= 0 and values.max() <= 1:
        percent(axes.yaxis)
        if len(values) == 1:
            axes.set_ylim(0, 1.08)
        else:
            spread = max(0.02, float(np.ptp(values)))
            axes.set_ylim(max(0.0, values.min() - 0.08 * spread), values.max() + 0.14 * spread)
    else:
        axes.set(title="Test score", ylabel="score on the test set, higher is better")
    axes.annotate(
        score_words(values[-1])[1], (times[-1], values[-1]), xytext=(0, 9), textcoords="offset points",
        ha="center", fontweight="bold", color=VERMILLION,
    )  # fmt: skip


def _draw_time(axes: Axes, seconds: Mapping[int, Mapping[str, float]]) -> None:
    axes.set_title("Where each replica's time went")
    ranks = np.arange(len(seconds))
    longest = max(sum(split.values()) for split in seconds.values())
    start = np.zeros(len(seconds))
    for part, words in PARTS_OF_TIME.items():
        width = np.array([split[part] for split in seconds.values()])
        if part in SELDOM and not width.any():
            continue
        colour = COLOURS[part]
        axes.barh(ranks, width, left=start, height=0.78, color=colour, label=words)
        if len(seconds) <= NAMED_RANKS:
            for y, (x, w, split) in enumerate(zip(start, width, seconds.values(), strict=True)):
                if w > 0.09 * longest:
                    share = f"{100 * w / sum(split.values()):.0f} %"
                    ink = "white" if colour in ON_DARK else INK
                    axes.text(x + w / 2, y, share, ha="center", va="center", color=ink, fontsize=9)
        start = start + width
    name_rows(axes, [str(rank) for rank in seconds])
    axes.set_xlim(0, longest * 1.02 or 1.0)
    centre, half = (len(seconds) - 1) / 2, max(len(seconds), FEWEST_RANKS) / 2 + 0.1
    axes.set_ylim(centre + half, centre - half)
    ticks(axes.xaxis)
    axes.legend(
        loc="upper center", bbox_to_anchor=(0.47, 0), borderaxespad=3.7, ncols=5, fontsize=9,
        columnspacing=0.9, handlelength=1.0, handletextpad=0.5,
    )  # fmt: skip
