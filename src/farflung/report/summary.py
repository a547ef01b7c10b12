"""How a run ended, as a table."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from farflung.errors import DataError
from farflung.extras import need
from farflung.types import Json

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["PARTS_OF_TIME", "SELDOM", "duration_words", "score_words", "summary_table"]

PARTS_OF_TIME = {
    "compute": "compute",
    "exposed_communication": "exposed communication",
    "data_wait": "data wait",
    "scoring": "scoring of samples",
    "evaluation": "evaluation, checkpoints",
    "other": "other",
}
"""The parts that a replica's time is split into, and what people call them."""
SELDOM: Mapping[str, Json] = {"scoring": 0.0}
"""Those that a run leaves out which had none of them."""

_LONGEST_S = 1e13
"""Of what can be written in hours and days."""


def score_words(score: float) -> tuple[str, str]:
    """What a metric is called and its value: an accuracy in percent where it can be one (0 to 1), else a score.

    >>> score_words(0.8731), score_words(-2.5)
    (('accuracy', '87.3 %'), ('score', '-2.5'))
    """
    return ("accuracy", f"{100 * score:.1f} %") if 0 <= score <= 1 else ("score", f"{score:.4g}")


def summary_table(summary: Mapping[str, Json], *, title: str = "", simulated: bool = False) -> Table:
    """The end of a run as two columns: what, and how much.

    Args:
      summary: what :meth:`farflung.replica.Summary.to_json` gives, or an ``end`` event.
      title: stands above the table.
      simulated: says so beside every time.

    Raises:
      DataError: a figure is absent; names it.
      MissingExtra: rich is not installed.
    """
    need("a table", "rich", extra="report")
    from rich.filesize import decimal
    from rich.table import Table
    from rich.text import Text

    clock = ", simulated" if simulated else ""
    steps = f"{_number(summary, 'steps'):,.0f}"
    table = Table(title=Text(title) if title else None, title_justify="left", show_header=False)
    table.add_column("what", no_wrap=True)
    table.add_column("how much", justify="right", no_wrap=True)
    if summary.get("stopped") and summary.get("final_accuracy") is None:
        table.add_row("test accuracy", "stopped before any")
    else:
        name, score = score_words(_number(summary, "final_accuracy"))
        table.add_row(f"test {name}", score, style="bold")
        table.add_row("test loss", f"{_number(summary, 'final_loss'):.4g}")
    table.add_row("steps", f"{steps}, stopped early" if summary.get("stopped") else steps)
    leg = summary.get("last_leg")
    if leg is not None:
        if not isinstance(leg, dict):
            raise DataError("the summary of the run has a damaged last_leg")
        since = duration_words(_number(leg, "duration_s"))
        table.add_row("resumed", f"at step {_number(leg, 'from_step'):,.0f}, {since} of the duration")
    table.add_row("samples", f"{_number(summary, 'samples'):,.0f}")
    table.add_row("sent per replica", decimal(int(_number(summary, "bytes_sent_per_replica"))))
    if isinstance(refused := summary.get("refused"), dict):
        table.add_row("refused", ", ".join(f"{count:,} {what}" for what, count in refused.items() if count))
    held = _number(summary, "schedule_bytes_per_replica")
    if held:
        table.add_row("held by the schedule", decimal(int(held)))
    table.add_row(f"duration{clock}", duration_words(_number(summary, "duration_s")), end_section=True)
    split = summary.get("time_s")
    if not isinstance(split, dict):
        raise DataError("the summary of the run has no time_s: it is damaged or of another kind")
    seconds = {name: _number({**SELDOM, **split}, name) for name in PARTS_OF_TIME}
    total = sum(seconds.values())
    for name, words in PARTS_OF_TIME.items():
        if name in SELDOM and not seconds[name]:
            continue
        share = f"{100 * seconds[name] / total:5.1f} %" if total > 0 else ""
        table.add_row(f"  {words}{clock}", f"{duration_words(seconds[name])}  {share}")
    if "coding_s" in summary:
        coding = _number(summary, "coding_s")
        each = duration_words(coding / max(1.0, _number(summary, "steps")))
        table.add_row(f"coding and messages{clock}", f"{duration_words(coding)}, {each} a step")
    unknown = summary.get("coding_not_charged")
    if isinstance(unknown, list):
        table.add_row("coding not charged", ", ".join(str(method) or "plain sums" for method in unknown))
    return table


def duration_words(seconds: float) -> str:
    """Seconds up to 100 of them, else hours, minutes and seconds."""
    counted = 99.95 <= seconds < _LONGEST_S
    return str(timedelta(seconds=round(seconds))) if counted else f"{seconds:.3g} s"


def _number(values: Mapping[str, Json], name: str) -> float:
    value = values.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise DataError(f"the summary of the run has no number {name}: it is damaged or of another kind")
    return value
