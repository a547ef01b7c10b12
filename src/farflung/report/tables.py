"""Tables of results, and the formatting of their figures."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from farflung.errors import DataError
from farflung.extras import require_modules
from farflung.report.reading import OPTIONAL_PARTS, TIME_PARTS, read_time_split
from farflung.telemetry import read_number
from farflung.types import Json

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "PLAIN_WIDTH",
    "create_table",
    "format_duration",
    "format_score",
    "get_output_width",
    "render_lines",
    "render_summary_table",
    "render_text",
]  # fmt: skip

PLAIN_WIDTH = 200
"""Width of output that does not go to a terminal, in characters."""
_LONGEST_S = 1e13
"""Upper bound of durations that can be formatted in days and hours."""


def create_table(title: str, **options: Any) -> Table:
    """Creates an empty table.

    Raises:
      MissingExtra: rich is not installed.
    """
    require_modules("a table", "rich", extra="report")
    from rich.table import Table
    from rich.text import Text

    return Table(title=Text(title) if title else None, title_justify="left", **options)


def get_output_width() -> int:
    """Returns the terminal's width in characters, or :data:`PLAIN_WIDTH` if stdout is not a terminal."""
    return shutil.get_terminal_size((PLAIN_WIDTH, 0)).columns


def render_text(table: Table) -> str:
    """Renders a table as lines without colours, no wider than :data:`PLAIN_WIDTH`."""
    from rich.console import Console

    buffer = io.StringIO()
    Console(file=buffer, width=PLAIN_WIDTH).print(table)
    return buffer.getvalue().rstrip("\n")


def render_lines(values: Mapping[str, Json]) -> str:
    """Formats figures as lines of name and value, for use without rich.

    >>> print(render_lines({"steps": 3, "time_s": {"compute": 0.5, "other": 0.0}}))
    steps 3
    time_s.compute 0.5
    time_s.other 0.0
    """
    lines = []
    for name, value in values.items():
        if isinstance(value, dict):
            lines += [f"{name}.{line}" for line in render_lines(value).splitlines()]
        else:
            lines.append(f"{name} {value if isinstance(value, str) else json.dumps(value)}")
    return "\n".join(lines)


def format_score(score: float) -> tuple[str, str]:
    """Returns a metric's name and value: an accuracy in percent if it lies between 0 and 1, else a score.

    >>> format_score(0.8731), format_score(-2.5)
    (('accuracy', '87.3 %'), ('score', '-2.5'))
    """
    return ("accuracy", f"{100 * score:.1f} %") if 0 <= score <= 1 else ("score", f"{score:.4g}")


def render_summary_table(
    summary: Mapping[str, Json], *, title: str = "", is_simulated: bool = False
) -> Table:
    """Renders the final summary of a run as a table of names and values.

    Args:
      summary: Result of :meth:`farflung.loop.Summary.to_json`, or an ``end`` event.
      title: Title above the table.
      is_simulated: Whether times are simulated, which the title then says.

    Raises:
      DataError: A figure is missing; names it.
      MissingExtra: rich is not installed.
    """
    table = create_table(
        "; ".join(filter(None, [title, "simulated times" if is_simulated else ""])), show_header=False
    )
    from rich.filesize import decimal

    def get_figure(name: str, values: Mapping[str, Json] = summary) -> float:
        return read_number(values, name, "the summary of the run")

    steps = f"{get_figure('steps'):,.0f}"
    table.add_column(no_wrap=True)
    table.add_column(justify="right", overflow="fold")
    if summary.get("stopped") and summary.get("final_accuracy") is None:
        table.add_row("test accuracy", "not evaluated yet")
    else:
        name, score = format_score(get_figure("final_accuracy"))
        table.add_row(f"test {name}", score, style="bold")
        table.add_row("test loss", f"{get_figure('final_loss'):.4g}")
    table.add_row("steps", f"{steps}, stopped early" if summary.get("stopped") else steps)
    leg = summary.get("last_leg")
    if leg is not None:
        if not isinstance(leg, dict):
            raise DataError("the summary of the run has a damaged last_leg")
        offset = format_duration(get_figure("duration_s", leg))
        table.add_row("resumed", f"at step {get_figure('from_step', leg):,.0f}, {offset} of the duration")
    table.add_row("samples", f"{get_figure('samples'):,.0f}")
    table.add_row("sent per replica", decimal(int(get_figure("bytes_sent_per_replica"))))
    if isinstance(refused := summary.get("refused"), dict):
        table.add_row("refused", ", ".join(f"{count:,} {cause}" for cause, count in refused.items() if count))
    if nbytes := get_figure("schedule_bytes_per_replica"):
        table.add_row("held by the schedule", decimal(int(nbytes)))
    if isinstance(sampling := summary.get("sampling"), dict):
        table.add_row("drawn by scores", _format_sampling(sampling))
    table.add_row("duration", format_duration(get_figure("duration_s")), end_section=True)
    seconds = read_time_split(summary, "the summary of the run")
    total = sum(seconds.values())
    for name, label in TIME_PARTS.items():
        if seconds[name] or name not in OPTIONAL_PARTS:
            share = f"{100 * seconds[name] / total:5.1f} %" if total > 0 else ""
            table.add_row(f"  {label}", f"{format_duration(seconds[name])}  {share}")
    if isinstance(slow := summary.get("bottleneck"), dict):
        replica = f"replica {slow['rank']}, " if "rank" in slow else ""
        fraction = read_number(slow, "share", "the bottleneck of the summary")
        table.add_row("bottleneck", f"{replica}{slow.get('reason')}: {100 * fraction:.0f} % of a step")
    if "coding_s" in summary:
        coding = get_figure("coding_s")
        per_step = format_duration(coding / max(1.0, get_figure("steps")))
        table.add_row("coding and messages", f"{format_duration(coding)}, {per_step} a step")
    unknown = summary.get("coding_not_charged")
    if isinstance(unknown, list):
        table.add_row("coding not charged", ", ".join(str(method) or "plain sums" for method in unknown))
    return table


def _format_sampling(sampling: Mapping[str, Json]) -> str:
    """Formats the number of steps drawn by scores, and their predicted gain or why it is undefined."""
    source = "the sampling of the run's summary"
    counts = sampling.get("steps")
    if not isinstance(counts, dict):
        raise DataError(f"{source}: no steps by rule")
    steps = {name: read_number(counts, name, source) for name in counts}
    drawn = f"{sum(steps.values()) - steps.get('uniform', 0):,.0f} steps"
    if reason := sampling.get("undefined"):
        return f"{drawn}; no gain known: {reason}"
    if sampling.get("gain") is None:
        return drawn
    return f"{drawn}, gain {read_number(sampling, 'gain', source):.2f} predicted"


def format_duration(seconds: float) -> str:
    """Formats a duration in seconds up to 100 s, else in hours, minutes and seconds."""
    is_long = 99.95 <= seconds < _LONGEST_S
    return str(timedelta(seconds=round(seconds))) if is_long else f"{seconds:.3g} s"
