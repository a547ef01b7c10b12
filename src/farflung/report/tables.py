"""Tables of results, and words for their figures."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from farflung.errors import DataError
from farflung.extras import need
from farflung.report.reading import PARTS_OF_TIME, SELDOM, time_split
from farflung.telemetry import number
from farflung.types import Json

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "PLAIN_WIDTH", "as_lines", "as_text", "duration_words", "new_table", "score_words", "summary_table", "text_width",
]  # fmt: skip

PLAIN_WIDTH = 200
"""Columns of a table that does not go to a terminal."""
_LONGEST_S = 1e13
"""Of what can be written in hours and days."""


def new_table(title: str, **look: Any) -> Table:
    """Makes an empty table.

    Raises:
      MissingExtra: rich is not installed.
    """
    need("a table", "rich", extra="report")
    from rich.table import Table
    from rich.text import Text

    return Table(title=Text(title) if title else None, title_justify="left", **look)


def text_width() -> int:
    """Returns the columns of the terminal, or :data:`PLAIN_WIDTH` where stdout is none."""
    return shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns


def as_text(table: Table) -> str:
    """Prints a table as lines without colours, no wider than :data:`PLAIN_WIDTH`."""
    from rich.console import Console

    printed = io.StringIO()
    Console(file=printed, width=PLAIN_WIDTH).print(table)
    return printed.getvalue().rstrip("\n")


def as_lines(values: Mapping[str, Json]) -> str:
    """Returns figures as lines of name and value, for where rich is not installed.

    >>> print(as_lines({"steps": 3, "time_s": {"compute": 0.5, "other": 0.0}}))
    steps 3
    time_s.compute 0.5
    time_s.other 0.0
    """
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += [f"{name}.{line}" for line in as_lines(value).splitlines()]
        else:
            lines.append(f"{name} {value if isinstance(value, str) else json.dumps(value)}")
    return "\n".join(lines)


def score_words(score: float) -> tuple[str, str]:
    """What a metric is called and its value: an accuracy in percent where it can be one (0 to 1), else a score.

    >>> score_words(0.8731), score_words(-2.5)
    (('accuracy', '87.3 %'), ('score', '-2.5'))
    """
    return ("accuracy", f"{100 * score:.1f} %") if 0 <= score <= 1 else ("score", f"{score:.4g}")


def summary_table(summary: Mapping[str, Json], *, title: str = "", simulated: bool = False) -> Table:
    """The end of a run as two columns: what, and how much.

    Args:
      summary: what :meth:`farflung.loop.Summary.to_json` gives, or an ``end`` event.
      title: stands above the table.
      simulated: says so beside every time.

    Raises:
      DataError: a figure is absent; names it.
      MissingExtra: rich is not installed.
    """
    table = new_table(title, show_header=False)
    from rich.filesize import decimal

    def figure(name: str, values: Mapping[str, Json] = summary) -> float:
        return number(values, name, "the summary of the run")

    clock = ", simulated" if simulated else ""
    steps = f"{figure('steps'):,.0f}"
    table.add_column("what", no_wrap=True)
    table.add_column("how much", justify="right", overflow="fold")
    if summary.get("stopped") and summary.get("final_accuracy") is None:
        table.add_row("test accuracy", "stopped before any")
    else:
        name, score = score_words(figure("final_accuracy"))
        table.add_row(f"test {name}", score, style="bold")
        table.add_row("test loss", f"{figure('final_loss'):.4g}")
    table.add_row("steps", f"{steps}, stopped early" if summary.get("stopped") else steps)
    leg = summary.get("last_leg")
    if leg is not None:
        if not isinstance(leg, dict):
            raise DataError("the summary of the run has a damaged last_leg")
        since = duration_words(figure("duration_s", leg))
        table.add_row("resumed", f"at step {figure('from_step', leg):,.0f}, {since} of the duration")
    table.add_row("samples", f"{figure('samples'):,.0f}")
    table.add_row("sent per replica", decimal(int(figure("bytes_sent_per_replica"))))
    if isinstance(refused := summary.get("refused"), dict):
        table.add_row("refused", ", ".join(f"{count:,} {what}" for what, count in refused.items() if count))
    if held := figure("schedule_bytes_per_replica"):
        table.add_row("held by the schedule", decimal(int(held)))
    if isinstance(sampling := summary.get("sampling"), dict):
        table.add_row("drawn by scores", _sampling_words(sampling))
    table.add_row(f"duration{clock}", duration_words(figure("duration_s")), end_section=True)
    seconds = time_split(summary, "the summary of the run")
    total = sum(seconds.values())
    for name, words in PARTS_OF_TIME.items():
        if seconds[name] or name not in SELDOM:
            share = f"{100 * seconds[name] / total:5.1f} %" if total > 0 else ""
            table.add_row(f"  {words}{clock}", f"{duration_words(seconds[name])}  {share}")
    if isinstance(slow := summary.get("slowest"), dict):
        which = f"replica {slow['rank']}, " if "rank" in slow else ""
        part = number(slow, "share", "the slowest replica of the summary")
        table.add_row(f"slowest{clock}", f"{which}{slow.get('reason')}: {100 * part:.0f} % of a step")
    if "coding_s" in summary:
        coding = figure("coding_s")
        each = duration_words(coding / max(1.0, figure("steps")))
        table.add_row(f"coding and messages{clock}", f"{duration_words(coding)}, {each} a step")
    unknown = summary.get("coding_not_charged")
    if isinstance(unknown, list):
        table.add_row("coding not charged", ", ".join(str(method) or "plain sums" for method in unknown))
    return table


def _sampling_words(sampling: Mapping[str, Json]) -> str:
    """In how many steps batches were drawn by scores, and what that is predicted to be worth, or why it is not."""
    where = "the sampling of the run's summary"
    counts = sampling.get("steps")
    if not isinstance(counts, dict):
        raise DataError(f"{where}: no steps by rule")
    steps = {name: number(counts, name, where) for name in counts}
    drawn = f"{sum(steps.values()) - steps.get('uniform', 0):,.0f} steps"
    if why := sampling.get("undefined"):
        return f"{drawn}; no gain known: {why}"
    if sampling.get("gain") is None:
        return drawn
    return f"{drawn}, gain {number(sampling, 'gain', where):.2f} predicted"


def duration_words(seconds: float) -> str:
    """Seconds up to 100 of them, else hours, minutes and seconds."""
    counted = 99.95 <= seconds < _LONGEST_S
    return str(timedelta(seconds=round(seconds))) if counted else f"{seconds:.3g} s"
