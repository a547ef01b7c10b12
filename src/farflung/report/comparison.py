"""Several runs beside each other: a table, and a picture of accuracy over time and over bytes."""

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
from farflung.report.pictures import BLUE, VERMILLION, percent, picture, ticks
from farflung.report.reading import PARTS_OF_TIME, SELDOM, sessions, time_split
from farflung.report.tables import PLAIN_WIDTH, duration_words, new_table, score_words
from farflung.telemetry import Event, number
from farflung.types import Json

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from rich.table import Table

__all__ = ["Compared", "Course", "compare_courses", "comparison_picture", "comparison_table"]

# Okabe and Ito's palette.
COLOURS = (BLUE, VERMILLION, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")
MARKERS = "osD^vPX*"
TEXTS = {"network", "recipe"}
"""Columns whose cells may take several lines."""
FOLDED = 16
"""Characters of a line of theirs, at least, where there is not room for more."""
LEFT_OUT = (
    "coding", "evaluation", "compute", "duration", "waiting", "rank 0 sent", "final accuracy", "final score",
    "speed-up",
)  # fmt: skip
"""Columns that a table has no room for go in this order."""
WIDE = 8.0
"""Where the longest run is so many times the shortest, axes of time and bytes are logarithmic."""


@dataclass(frozen=True, slots=True)
class Course:
    """What one run learned, and when.

    Args:
      recipe: how it was trained.
      network: on which network.
      seed: of the run.
      scores: simulated seconds since its beginning, bytes sent by rank 0, and metric of each evaluation.
      summary: its end, as :meth:`farflung.loop.Summary.to_json` gives it.
    """

    recipe: str
    network: str
    seed: int
    scores: tuple[tuple[float, int, float], ...]
    summary: Mapping[str, Json]

    @staticmethod
    def of(
        recipe: str, network: str, seed: int, events: Iterable[Event], summary: Mapping[str, Json]
    ) -> Course:
        """From the events of rank 0.

        Raises:
          DataError: an event is damaged, or the run was never evaluated.
        """
        of = f"{recipe} on {network}, seed {seed}"
        scores = tuple(
            (at, int(number(event, "bytes_sent", of)), number(event, "accuracy", of))
            for session in sessions(events, of)
            for at, event in session
            if event["event"] == "evaluation"
        )
        if not scores:
            raise DataError(f"{of}: it was never evaluated")
        return Course(recipe, network, seed, scores, summary)

    @property
    def best(self) -> float:
        """The best score of all evaluations."""
        return max(score for _, _, score in self.scores)

    def reaches(self, target: float) -> tuple[float, int] | None:
        """Seconds and bytes up to the first evaluation at which the score is at least ``target``."""
        return next(((t, sent) for t, sent, score in self.scores if score >= target), None)


@dataclass(frozen=True, slots=True)
class Compared:
    """One recipe on one network: means over seeds, times simulated.

    Args:
      network: which.
      recipe: how it was trained.
      seeds: how many runs.
      reached: how many of them reached the target.
      time_to_target_s: up to the first evaluation there; ``None`` where not every run reached it.
      bytes_to_target: sent by rank 0 up to then; ``None`` likewise.
      speed_up: of that time over the first recipe's on the same network; ``None`` where one of the two is.
      final_accuracy: at the end.
      final_accuracy_range: the least and the greatest of all seeds.
      bytes_sent_per_replica: by rank 0 in all.
      duration_s: of the whole run.
      time_s: by part, of rank 0.
      coding_s: in which it coded and moved messages, beside these; 0 where its device has no rates for that.
    """

    network: str
    recipe: str
    seeds: int
    reached: int
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
        """For ``--json``."""
        return {**asdict(self), "final_accuracy_range": list(self.final_accuracy_range)}


def compare_courses(courses: Sequence[Course], target: float) -> list[Compared]:
    """One row for each network and recipe, in the order in which they first come."""
    rows: list[Compared] = []
    first: dict[str, float | None] = {}
    networks, recipes = (
        dict.fromkeys(getattr(course, name) for course in courses) for name in ("network", "recipe")
    )
    for network, recipe in product(networks, recipes):
        group = [course for course in courses if (course.network, course.recipe) == (network, recipe)]
        if not group:
            continue
        of = f"{recipe} on {network}: its summary"
        means = {
            name: fmean(number({"coding_s": 0.0, **course.summary}, name, of) for course in group)
            for name in ("bytes_sent_per_replica", "duration_s", "coding_s")
        }
        splits = [time_split(course.summary, of) for course in group]
        parts = {part: fmean(split[part] for split in splits) for part in PARTS_OF_TIME}
        reached = [found for course in group if (found := course.reaches(target)) is not None]
        all_did = len(reached) == len(group)
        seconds = fmean(t for t, _ in reached) if all_did else None
        base = first.setdefault(network, seconds)
        finals = [course.scores[-1][2] for course in group]
        rows.append(
            Compared(
                network,
                recipe,
                seeds=len(group),
                reached=len(reached),
                time_to_target_s=seconds,
                bytes_to_target=fmean(sent for _, sent in reached) if all_did else None,
                speed_up=None if base is None or not seconds else base / seconds,
                final_accuracy=fmean(finals),
                final_accuracy_range=(min(finals), max(finals)),
                time_s={part: mean for part, mean in parts.items() if mean or part not in SELDOM},
                **means,
            )
        )
    return rows


def comparison_table(rows: Sequence[Compared], target: float, width: int | None = None) -> Table:
    """Returns the comparison as a table for people; it says that all times are simulated.

    What all rows share, of recipes too, is said once above them. Long recipes take several lines. Where the table is
    wider than it may be, columns go one by one, in the order of :data:`LEFT_OUT`, and are named below; no figure is
    cut. Coding, which goes on beside the parts that a replica's time is split into, is a share of the same time.

    Args:
      rows: of the comparison.
      target: that they reached, or did not.
      width: that is available, in characters; :data:`PLAIN_WIDTH` when not given.

    Raises:
      MissingExtra: rich is not installed.
    """
    width = width or PLAIN_WIDTH
    table = new_table("", caption_justify="left")
    from rich.text import Text

    name, words = score_words(target)
    title = [f"Simulated. Time to {name} {words}; speed-up over the first recipe of the same network."]
    columns = _columns(rows, f"final {name}")
    if len({row.network for row in rows}) == 1:
        title.append(f"All on {rows[0].network}.")
        del columns["network"]
    start, end = _shared(columns["recipe"])
    if start or end:
        title.append(f"All recipes: {start}…{end}")
        columns["recipe"] = [text[len(start) : len(text) - len(end)] for text in columns["recipe"]]
    widths, left_out = _fitted(columns, width)
    table.title = Text("\n".join(title))
    table.min_width = min(width, max(map(len, title)))
    table.caption = Text(f"No room for: {', '.join(left_out)}.") if left_out else None
    for column, chars in widths.items():
        style = "bold" if column == "recipe" else None
        table.add_column(
            column, style=style, width=chars, justify="left" if column in TEXTS else "right", overflow="fold"
        )
    before = None
    for place, row in enumerate(rows):
        if before not in (None, row.network):
            table.add_section()
        cells = {column: columns[column][place] for column in widths}
        if row.network == before and "network" in cells:
            cells["network"] = ""
        for column in TEXTS & cells.keys():
            cells[column] = _folded(cells[column], widths[column])
        table.add_row(*map(Text, cells.values()))
        before = row.network
    return table


def _columns(rows: Sequence[Compared], final: str) -> dict[str, list[str]]:
    """Returns the cells of each column; evaluation and coding are left out where no row has any."""
    from rich.filesize import decimal

    lines: list[dict[str, str]] = []
    for row in rows:
        total = sum(row.time_s.values()) or 1.0
        waiting = row.time_s["exposed_communication"] + row.time_s["data_wait"]
        low, high = (score_words(score)[1] for score in row.final_accuracy_range)
        mean = score_words(row.final_accuracy)[1]
        missed = f"{row.reached} of {row.seeds} runs"
        shares = {"compute": row.time_s["compute"], "waiting": waiting}
        shares |= {"evaluation": row.time_s["evaluation"], "coding": row.coding_s}
        lines.append(
            {
                "network": row.network,
                "recipe": row.recipe,
                "to target": missed if row.time_to_target_s is None else duration_words(row.time_to_target_s),
                "speed-up": "" if row.speed_up is None else f"{row.speed_up:.2f}",
                final: f"{mean}\n{low} to {high}" if row.seeds > 1 else mean,
                "rank 0 sent": decimal(int(row.bytes_sent_per_replica)),
                "duration": duration_words(row.duration_s),
                **{name: f"{100 * part / total:.0f} %" for name, part in shares.items()},
            }
        )
    columns = {name: [line[name] for line in lines] for name in lines[0]}
    if not any(row.time_s["evaluation"] for row in rows):
        del columns["evaluation"]
    if not any(row.coding_s for row in rows):
        del columns["coding"]
    return columns


def _fitted(columns: Mapping[str, Sequence[str]], width: int) -> tuple[dict[str, int], list[str]]:
    """Returns the width of each column that there is room for, and the names of the others."""

    def widest(texts: Iterable[str]) -> int:
        return max(map(len, texts), default=0)

    cells = {
        name: widest(line for cell in column for line in cell.split("\n")) for name, column in columns.items()
    }
    whole = {name: max(len(name), chars) for name, chars in cells.items()}
    widths = {
        name: max(widest(name.split()), min(chars, FOLDED) if name in TEXTS else chars)
        for name, chars in cells.items()
    }

    def room() -> int:
        return width - sum(widths.values()) - 3 * len(widths) - 1

    left_out: list[str] = []
    for name in LEFT_OUT:
        if room() < 0 and name in widths:
            del widths[name]
            left_out.append(name)
    for name, chars in whole.items():  # texts are first in the table, so they take what room there is
        if name in widths:
            widths[name] += max(0, min(room(), chars - widths[name]))
    return widths, left_out


def _shared(recipes: Sequence[str]) -> tuple[str, str]:
    """Returns how all recipes begin and end, as far as a name or a value in whole brackets remains of each.

    >>> _shared(["ring(codec=int8)", "ring(codec=topk(density=0.1))"])
    ('ring(codec=', ')')
    """
    first = min(recipes, key=len, default="")
    if len(set(recipes)) < 2:
        return "", ""
    starts = [""] + [first[:at] for at in range(1, len(first)) if first[at - 1] in "(= "]
    ends = [""] + [first[at:] for at in range(1, len(first)) if first[at] in "(,)"]
    return max(
        (
            (start, end)
            for start in starts
            for end in ends
            if all(
                text.startswith(start)
                and text.endswith(end)
                and _is_whole(text[len(start) : len(text) - len(end)])
                for text in recipes
            )
        ),
        key=lambda found: sum(map(len, found)),
        default=("", ""),
    )


def _is_whole(text: str) -> bool:
    """Returns True for a text that is not empty and closes each bracket that it opens."""
    depth = [text[:at].count("(") - text[:at].count(")") for at in range(1, len(text) + 1)]
    return bool(depth) and min(depth) >= 0 and depth[-1] == 0


def _folded(text: str, width: int) -> str:
    """Breaks a text into lines, behind signs where there are some.

    >>> _folded("error_feedback(topk(density=0.01))", 16).splitlines()
    ['error_feedback(', 'topk(density=', '0.01))']
    """
    lines = [""]
    for piece in re.findall(rf"[^(=, /]{{1,{width}}}[(=, /]?|[(=, /]", text):
        if len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return "\n".join(line.rstrip() for line in lines)


def comparison_picture(courses: Sequence[Course], path: Path, *, title: str, target: float) -> None:
    """Draws accuracy over time and over bytes sent, a row for each network, a line for each recipe.

    Axes are logarithmic where runs differ widely. With several seeds a line is their mean, and a band reaches from the
    least to the greatest.

    Args:
      courses: of all runs.
      path: the PNG; its folder is made, and it appears whole or not at all.
      title: stands above the picture.
      target: a line is drawn there.

    Raises:
      MissingExtra: matplotlib is not installed.
    """
    networks = list(dict.fromkeys(course.network for course in courses))
    recipes = list(dict.fromkeys(course.recipe for course in courses))
    with picture(path, (12, 1.0 + 3.9 * len(networks)), title, simulated=True) as figure:
        panels = figure.subplots(len(networks), 2, squeeze=False)
        for network, (over_time, over_bytes) in zip(networks, panels, strict=True):
            over_time.set(title=network, xlabel="simulated time (s)")
            here = [course for course in courses if course.network == network]
            name, unit = _unit(max(sent for course in here for _, sent, _ in course.scores))
            over_bytes.set(title=network, xlabel=f"sent by rank 0 ({name})")
            for number, recipe in enumerate(recipes):
                group = [c for c in courses if (c.network, c.recipe) == (network, recipe)]
                _draw(over_time, group, number, 0, 1.0)
                _draw(over_bytes, group, number, 1, unit)
            for column, axes in enumerate((over_time, over_bytes)):
                ends = [course.scores[-1][column] for course in here]
                _finish(axes, target, wide=max(ends) > WIDE * min(ends) > 0)
        panels[0][0].legend(loc="lower right")


def _unit(nbytes: int) -> tuple[str, float]:
    """The unit in which so many bytes are a number of one to three digits, and how many bytes it is."""
    units = {"bytes": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}
    return next(((name, size) for name, size in reversed(units.items()) if nbytes >= size), ("bytes", 1.0))


def _draw(axes: Axes, group: Sequence[Course], number: int, column: int, unit: float) -> None:
    if not group:
        return
    points = min(len(course.scores) for course in group)
    at = np.array([[score[column] / unit for score in course.scores[:points]] for course in group])
    values = np.array([[score[2] for score in course.scores[:points]] for course in group])
    colour = COLOURS[number % len(COLOURS)]
    axes.plot(
        at.mean(axis=0), values.mean(axis=0), color=colour, linewidth=2, label=group[0].recipe,
        marker=MARKERS[number % len(MARKERS)], markersize=4.5,
    )  # fmt: skip
    if len(group) > 1:
        axes.fill_between(
            at.mean(axis=0), values.min(axis=0), values.max(axis=0), color=colour, alpha=0.18, linewidth=0
        )


def _finish(axes: Axes, target: float, *, wide: bool) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.axhline(target, color="#777777", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    if wide:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    ticks(axes.xaxis)
    if wide:
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_formatter(NullFormatter())
    low, high = axes.get_ylim()
    if low >= -0.1 and high <= 1.1 and math.isfinite(target):
        percent(axes.yaxis)
        axes.set_ylabel("test accuracy (%)")
    else:
        axes.set_ylabel("test score, higher is better")
