"""Comparisons of several runs: a table, and a picture of accuracy over time and over bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from farflung.errors import DataError
from farflung.report.pictures import BLUE, VERMILLION, create_picture, set_percent_ticks, set_ticks
from farflung.report.reading import OPTIONAL_PARTS, TIME_PARTS, read_time_split, split_sessions
from farflung.report.tables import PLAIN_WIDTH, create_table, format_duration, format_score
from farflung.telemetry import Event, read_number
from farflung.types import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

__all__ = [
    "ComparisonRow",
    "RunHistory",
    "compare_runs",
    "draw_comparison",
    "fold_text",
    "render_comparison_table",
]

# Okabe and Ito's palette.
COLOURS = (BLUE, VERMILLION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vPX*"
TEXT_COLUMNS = {"network", "recipe"}
"""Columns whose cells may take several lines."""
MIN_FOLDED_WIDTH = 16
"""Minimum width of these columns, in characters, if the table is too wide."""
DROPPABLE_COLUMNS = (
    "coding", "evaluation", "compute", "duration", "waiting", "rank 0 sent", "final accuracy", "final score",
    "speed-up",
)  # fmt: skip
"""Columns that are dropped from a table that is too wide, in this order."""
LOG_SCALE_RATIO = 8.0
"""Ratio of the longest run to the shortest above which axes of time and bytes are logarithmic."""


@dataclass(frozen=True, slots=True)
class RunHistory:
    """Evaluations of one run over time, and its summary.

    Args:
      recipe: Recipe of the run.
      network: Network of the run.
      seed: Seed of the run.
      scores: Simulated seconds since the run began, bytes sent by rank 0, and metric of each evaluation.
      summary: Final summary, as :meth:`farflung.loop.Summary.to_json` returns it.
    """

    recipe: str
    network: str
    seed: int
    scores: tuple[tuple[float, int, float], ...]
    summary: Mapping[str, Json]

    @staticmethod
    def from_events(
        recipe: str, network: str, seed: int, events: Iterable[Event], summary: Mapping[str, Json]
    ) -> RunHistory:
        """Builds the history from the events of one replica.

        Raises:
          DataError: An event is damaged, or the run was never evaluated.
        """
        source = f"{recipe} on {network}, seed {seed}"
        scores = tuple(
            (time_s, int(read_number(event, "bytes_sent", source)), read_number(event, "accuracy", source))
            for session in split_sessions(events, source)
            for time_s, event in session
            if event["event"] == "evaluation"
        )
        if not scores:
            raise DataError(f"{source}: it was never evaluated")
        return RunHistory(recipe, network, seed, scores, summary)

    @property
    def max_score(self) -> float:
        """Best score of all evaluations."""
        return max(score for _, _, score in self.scores)

    def find_target_cost(self, target: float) -> tuple[float, int] | None:
        """Returns seconds and bytes up to the first evaluation with a score of at least ``target``, or None."""
        return next(((t, sent) for t, sent, score in self.scores if score >= target), None)


@dataclass(frozen=True, slots=True)
class ComparisonRow:
    """Results of one recipe on one network: means over seeds, with simulated times.

    Args:
      network: Network of the runs.
      recipe: Recipe of the runs.
      num_seeds: Number of runs.
      num_reached: Number of runs that reached the target.
      time_to_target_s: Time to the target; ``None`` unless every run reached it.
      bytes_to_target: Bytes sent by rank 0 up to then; ``None`` unless every run reached the target.
      speed_up: Time to the target of the network's first recipe over this one's; ``None`` if either is.
      final_accuracy: Score at the end of the run.
      final_accuracy_range: Lowest and highest final score of all seeds.
      bytes_sent_per_replica: Bytes sent by rank 0 in the whole run.
      duration_s: Duration of the whole run.
      time_s: Seconds of rank 0 by part.
      coding_s: Seconds of coding and moving messages, beside ``time_s``; 0 if the device has no rates for it.
    """

    network: str
    recipe: str
    num_seeds: int
    num_reached: int
    time_to_target_s: float | None
    bytes_to_target: float | None
    speed_up: float | None
    final_accuracy: float
    final_accuracy_range: tuple[float, float]
    bytes_sent_per_replica: float
    duration_s: float
    time_s: Mapping[str, float]
    coding_s: float

    def to_json(self) -> dict[str, Json]:
        """Returns the row as JSON, for ``--json``."""
        return {**asdict(self), "final_accuracy_range": list(self.final_accuracy_range)}


def compare_runs(runs: Sequence[RunHistory], target: float) -> list[ComparisonRow]:
    """Builds one row for each network and recipe, in the order of their first appearance."""
    rows: list[ComparisonRow] = []
    baselines: dict[str, float | None] = {}
    networks, recipes = (dict.fromkeys(getattr(run, name) for run in runs) for name in ("network", "recipe"))
    for network, recipe in product(networks, recipes):
        group = [run for run in runs if (run.network, run.recipe) == (network, recipe)]
        if not group:
            continue
        source = f"{recipe} on {network}: its summary"
        means = {
            name: fmean(read_number({"coding_s": 0.0, **run.summary}, name, source) for run in group)
            for name in ("bytes_sent_per_replica", "duration_s", "coding_s")
        }
        splits = [read_time_split(run.summary, source) for run in group]
        parts = {part: fmean(split[part] for split in splits) for part in TIME_PARTS}
        costs = [cost for run in group if (cost := run.find_target_cost(target)) is not None]
        all_reached = len(costs) == len(group)
        seconds = fmean(time_s for time_s, _ in costs) if all_reached else None
        baseline = baselines.setdefault(network, seconds)
        finals = [run.scores[-1][2] for run in group]
        rows.append(
            ComparisonRow(
                network,
                recipe,
                num_seeds=len(group),
                num_reached=len(costs),
                time_to_target_s=seconds,
                bytes_to_target=fmean(nbytes for _, nbytes in costs) if all_reached else None,
                speed_up=None if baseline is None or not seconds else baseline / seconds,
                final_accuracy=fmean(finals),
                final_accuracy_range=(min(finals), max(finals)),
                time_s={part: mean for part, mean in parts.items() if mean or part not in OPTIONAL_PARTS},
                **means,
            )
        )
    return rows


def render_comparison_table(rows: Sequence[ComparisonRow], target: float, width: int | None = None) -> Table:
    """Renders the comparison as a table, which says that all times are simulated.

    Text that all rows share, of recipes too, moves to the title. Long recipes take several lines. If the table
    is too wide, columns are dropped in the order of :data:`DROPPABLE_COLUMNS` and named in the caption. No
    figure is cut. The share of coding refers to the same total as the parts of a replica's time, though it
    overlaps them.

    Args:
      rows: Rows of the comparison.
      target: Target score.
      width: Available width in characters; :data:`PLAIN_WIDTH` by default.

    Raises:
      MissingExtra: rich is not installed.
    """
    width = width or PLAIN_WIDTH
    table = create_table("", caption_justify="left")
    from rich.text import Text

    name, words = format_score(target)
    title = [f"Simulated. Time to {name} {words}; speed-up over the first recipe of the same network."]
    columns = _build_columns(rows, f"final {name}")
    if len({row.network for row in rows}) == 1:
        title.append(f"All on {rows[0].network}.")
        del columns["network"]
    start, end = _find_affixes(columns["recipe"])
    if start or end:
        title.append(f"All recipes: {start}…{end}")
        columns["recipe"] = [text[len(start) : len(text) - len(end)] for text in columns["recipe"]]
    widths, dropped = _fit_columns(columns, width)
    table.title = Text("\n".join(title))
    table.min_width = min(width, max(map(len, title)))
    table.caption = (
        Text(f"More in a wider terminal or with --json: {', '.join(dropped)}.") if dropped else None
    )
    for column, chars in widths.items():
        style = "bold" if column == "recipe" else None
        table.add_column(
            column,
            style=style,
            width=chars,
            justify="left" if column in TEXT_COLUMNS else "right",
            overflow="fold",
        )
    previous_network = None
    for index, row in enumerate(rows):
        if previous_network not in (None, row.network):
            table.add_section()
        cells = {column: columns[column][index] for column in widths}
        if row.network == previous_network and "network" in cells:
            cells["network"] = ""
        for column in TEXT_COLUMNS & cells.keys():
            cells[column] = fold_text(cells[column], widths[column])
        table.add_row(*map(Text, cells.values()))
        previous_network = row.network
    return table


def _build_columns(rows: Sequence[ComparisonRow], score_column: str) -> dict[str, list[str]]:
    """Builds the cells of each column; leaves out evaluation and coding if no row has any."""
    from rich.filesize import decimal

    lines: list[dict[str, str]] = []
    for row in rows:
        total = sum(row.time_s.values()) or 1.0
        waiting = row.time_s["exposed_communication"] + row.time_s["data_wait"]
        low, high = (format_score(score)[1] for score in row.final_accuracy_range)
        mean = format_score(row.final_accuracy)[1]
        count = f"{row.num_reached} of {row.num_seeds} runs"
        shares = {"compute": row.time_s["compute"], "waiting": waiting}
        shares |= {"evaluation": row.time_s["evaluation"], "coding": row.coding_s}
        lines.append(
            {
                "network": row.network,
                "recipe": row.recipe,
                "to target": count if row.time_to_target_s is None else format_duration(row.time_to_target_s),
                "speed-up": "" if row.speed_up is None else f"{row.speed_up:.2f}",
                score_column: f"{mean}\n{low} to {high}" if row.num_seeds > 1 else mean,
                "rank 0 sent": decimal(int(row.bytes_sent_per_replica)),
                "duration": format_duration(row.duration_s),
                **{name: f"{100 * part / total:.0f} %" for name, part in shares.items()},
            }
        )
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    if not any(row.time_s["evaluation"] for row in rows):
        del columns["evaluation"]
    if not any(row.coding_s for row in rows):
        del columns["coding"]
    return columns


def _fit_columns(columns: Mapping[str, Sequence[str]], width: int) -> tuple[dict[str, int], list[str]]:
    """Returns the width of each column that fits, and the names of the dropped ones."""

    def measure_width(texts: Iterable[str]) -> int:
        return max(map(len, texts), default=0)

    cells = {
        name: measure_width(line for cell in column for line in cell.split("\n"))
        for name, column in columns.items()
    }
    natural_widths = {name: max(len(name), chars) for name, chars in cells.items()}
    widths = {
        name: max(
            measure_width(name.split()), min(chars, MIN_FOLDED_WIDTH) if name in TEXT_COLUMNS else chars
        )
        for name, chars in cells.items()
    }

    def count_free() -> int:
        return width - sum(widths.values()) - 3 * len(widths) - 1

    dropped: list[str] = []
    for name in DROPPABLE_COLUMNS:
        if count_free() < 0 and name in widths:
            del widths[name]
            dropped.append(name)
    for name, chars in natural_widths.items():  # text columns come first and take the free width
        if name in widths:
            widths[name] += max(0, min(count_free(), chars - widths[name]))
    return widths, dropped


def _find_affixes(recipes: Sequence[str]) -> tuple[str, str]:
    """Finds the longest common prefix and suffix of recipes that leave a name or a balanced value of each.

    >>> _find_affixes(["ring(codec=int8)", "ring(codec=topk(density=0.1))"])
    ('ring(codec=', ')')
    """
    first = min(recipes, key=len, default="")
    if len(set(recipes)) < 2:
        return "", ""
    starts = [""] + [first[:i] for i in range(1, len(first)) if first[i - 1] in "(= "]
    ends = [""] + [first[i:] for i in range(1, len(first)) if first[i] in "(,)"]
    return max(
        (
            (start, end)
            for start in starts
            for end in ends
            if all(
                text.startswith(start)
                and text.endswith(end)
                and _is_balanced(text[len(start) : len(text) - len(end)])
                for text in recipes
            )
        ),
        key=lambda affixes: sum(map(len, affixes)),
        default=("", ""),
    )


def _is_balanced(text: str) -> bool:
    """Returns True if a text is not empty and closes each bracket that it opens."""
    depth = [text[:i].count("(") - text[:i].count(")") for i in range(1, len(text) + 1)]
    return bool(depth) and min(depth) >= 0 and depth[-1] == 0


def fold_text(text: str, width: int) -> str:
    """Breaks a text into lines, after punctuation if possible.

    >>> fold_text("error_feedback(topk(density=0.01))", 16).splitlines()
    ['error_feedback(', 'topk(density=', '0.01))']
    """
    lines = [""]
    for token in re.findall(rf"[^(=, /]{{1,{width}}}[(=, /]?|[(=, /]", text):
        if len(lines[-1]) + len(token.rstrip()) > width:
            lines.append("")
        lines[-1] += token
    return "\n".join(line.rstrip() for line in lines)


def draw_comparison(runs: Sequence[RunHistory], path: Path, *, title: str, target: float) -> None:
    """Draws accuracy over time and over bytes sent, a row for each network and a line for each recipe.

    Axes are logarithmic if durations differ widely. A line is the mean of all seeds, a band their range.

    Args:
      runs: Histories of all runs.
      path: Path of the PNG, which is written atomically; its folder is created.
      title: Title of the picture.
      target: Target score, drawn as a line.

    Raises:
      MissingExtra: matplotlib is not installed.
    """
    networks = list(dict.fromkeys(run.network for run in runs))
    recipes = list(dict.fromkeys(run.recipe for run in runs))
    with create_picture(path, (12, 1.0 + 3.9 * len(networks)), title, is_simulated=True) as figure:
        panels = figure.subplots(len(networks), 2, squeeze=False)
        for network, (over_time, over_bytes) in zip(networks, panels, strict=True):
            over_time.set(title=network, xlabel="simulated time (s)")
            group_runs = [run for run in runs if run.network == network]
            name, unit = _choose_unit(max(sent for run in group_runs for _, sent, _ in run.scores))
            over_bytes.set(title=network, xlabel=f"sent by rank 0 ({name})")
            for number, recipe in enumerate(recipes):
                group = [c for c in runs if (c.network, c.recipe) == (network, recipe)]
                _draw(over_time, group, number, 0, 1.0)
                _draw(over_bytes, group, number, 1, unit)
            for column, axes in enumerate((over_time, over_bytes)):
                ends = [run.scores[-1][column] for run in group_runs]
                _finish_axes(axes, target, is_log=max(ends) > LOG_SCALE_RATIO * min(ends) > 0)
        panels[0][0].legend(loc="lower right")


def _choose_unit(nbytes: int) -> tuple[str, float]:
    """Returns the unit in which a number of bytes has one to three digits, and the unit's size in bytes."""
    units = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    return next(((name, size) for name, size in reversed(units.items()) if nbytes >= size), ("bytes", 1.0))


def _draw(axes: Axes, group: Sequence[RunHistory], number: int, column: int, unit: float) -> None:
    if not group:
        return
    points = min(len(run.scores) for run in group)
    x = np.array([[score[column] / unit for score in run.scores[:points]] for run in group])
    y = np.array([[score[2] for score in run.scores[:points]] for run in group])
    colour = COLOURS[number % len(COLOURS)]
    axes.plot(
        x.mean(axis=0), y.mean(axis=0), color=colour, linewidth=2, label=group[0].recipe,
        marker=MARKERS[number % len(MARKERS)], markersize=4.5,
    )  # fmt: skip
    if len(group) > 1:
        axes.fill_between(x.mean(axis=0), y.min(axis=0), y.max(axis=0), color=colour, alpha=0.18, linewidth=0)


def _finish_axes(axes: Axes, target: float, *, is_log: bool) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.axhline(target, color="#777777", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    if is_log:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    set_ticks(axes.xaxis)
    if is_log:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    if low >= -0.1 and high <= 1.1 and math.isfinite(target):
        set_percent_ticks(axes.yaxis)
        axes.set_ylabel("test accuracy (%)")
    else:
        axes.set_ylabel("test score, higher is better")
