"""Table and page of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from farflung.files import replace_nonfinite
from farflung.report.comparison import fold_text
from farflung.report.page import build_table
from farflung.report.tables import create_table, format_duration
from farflung.types import Json

if TYPE_CHECKING:
    from rich.table import Table

    from farflung.planning.choice import PlanRow
    from farflung.planning.result import Plan

__all__ = ["build_plan_data", "render_plan_table"]

RECIPE_WIDTH, WIDTH = 22, 80
"""Characters of the column of recipes, and of the table."""


def render_plan_table(plan: Plan) -> Table:
    """Renders a plan as a table of at most 80 characters, with its advice below.

    Raises:
      MissingExtra: rich is not installed.
    """
    title = f"Simulated. {plan.steps:,} steps; what a recipe learns in them is not known."
    if plan.choice is not None:
        unit = " points" if plan.is_accuracy else ""
        less = f"{_format_gap(plan.tolerance, plan.is_accuracy)}{unit}"
        title = f"Simulated. Target: the score of {plan.reference} after {plan.steps:,} steps, less {less}."
    table = create_table(title, caption_justify="left")
    from rich import box
    from rich.filesize import decimal
    from rich.text import Text

    table.box, table.padding, table.width = box.SIMPLE_HEAD, (0, 0), WIDTH
    rows = [row for row in plan.rows if row.step_s is not None]
    columns = {
        "recipe": [fold_text(row.recipe, RECIPE_WIDTH) for row in rows],
        "a step": [format_duration(row.step_s or 0.0) for row in rows],
        "waits": [f"{row.waiting:.0%}" for row in rows],
        "short by": [_format_gap(row.gap, plan.is_accuracy, row.noise) for row in rows],
        "to the target" if plan.choice else "all steps": [_format_time(row) for row in rows],
        "sent": ["" if row.sent_nbytes is None else decimal(int(row.sent_nbytes)) for row in rows],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    for name in columns:
        is_number = name in ("a step", "waits", "short by", "sent")
        table.add_column(name, justify="right" if is_number else "left", no_wrap=is_number)
    for row, *cells in zip(rows, *columns.values(), strict=True):
        table.add_row(*map(Text, cells), style="bold" if row is plan.choice else None)
    table.caption = Text("\n".join(_list_advice(plan)), style="default")
    return table


def build_plan_data(plan: Plan) -> dict[str, Json]:
    """Builds the data of the page of a plan: bars from the lower to the upper bound of each time, and a table."""
    bars: list[Json] = [
        [row.recipe, low := row.low_s or 0.0, row.high_s - low] for row in plan.rows if row.high_s is not None
    ]
    columns: dict[str, list[Json]] = {
        "recipe": [row.recipe for row in plan.rows],
        "network": [row.network for row in plan.rows],
        "a step (s)": [row.step_s for row in plan.rows],
        "waits (%)": [100 * row.waiting if row.step_s else None for row in plan.rows],
        "outcome": [row.status for row in plan.rows],
        "short by": [row.gap for row in plan.rows],
        "noise": [row.noise for row in plan.rows],
        "at least (s)": [row.low_s for row in plan.rows],
        "at most (s)": [row.high_s for row in plan.rows],
        "bytes sent": [row.sent_nbytes for row in plan.rows],
        "reason": [row.reason for row in plan.rows],
    }
    if len({row.network for row in plan.rows if row.network}) == 1:
        del columns["network"]
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    figures: list[Json] = [
        {
            "kind": "bars",
            "title": "Seconds to the target, from the lower bound to the upper one",
            "shades": [5, 0],
            "columns": ["recipe", "up to the lower bound (s)", "from there to the upper bound (s)"],
            "rows": bars,
        },
        build_table("All recipes", columns, zip(*columns.values(), strict=True)),
    ]
    data: dict[str, Json] = {
        "title": f"plan: {plan.settings['workload']}, {plan.steps:,} steps",
        "state": f"take {plan.choice.recipe}" if plan.choice else "",
        "simulated": "All times are simulated.",
        "runs": [],
        "live": False,
        "sections": [{"title": "Plan", "figures": figures}],
    }
    return dict(replace_nonfinite(data))


def _format_gap(gap: float | None, is_accuracy: bool, noise: float | None = None) -> str:
    """Formats a difference of scores, in points if they are accuracies, with its noise; empty without one."""
    factor = 100 if is_accuracy else 1
    if gap is None:
        return ""
    return f"{factor * gap:.2g}" if noise is None else f"{factor * gap:.2g} ±{factor * noise:.1g}"


def _format_time(row: PlanRow) -> str:
    if row.high_s is None:
        if row.status == "timed":
            return format_duration(row.duration_s or 0.0)
        return {"misses": "misses it", "slower": "later", "untried": "not tried"}[row.status]
    high = format_duration(row.high_s)
    if row.low_s is None:
        return f"at most {high}"
    low = format_duration(row.low_s)
    return f"{low.removesuffix(' s') if high.endswith(' s') else low} to {high}"


def _list_advice(plan: Plan) -> Sequence[str]:
    """Lists what to take, with what else is as good, and what the figures leave out."""
    lines: list[str] = []
    if plan.choice is not None:
        (reference,) = (row for row in plan.rows if row.recipe == plan.reference)
        times = (reference.step_s or 0.0) / (plan.choice.step_s or 1.0)
        lines.append(f"Take {plan.choice.recipe}: {times:.3g} steps in the time of one of {plan.reference}.")
        if plan.similar:
            lines.append(
                f"As fast, for all a simulation can say: {', '.join(r.recipe for r in plan.similar)}."
            )
        lines.append(f"Pilots took {plan.pilots:.2g} trainings.")
    reasons: dict[str, list[str]] = {}
    for row in plan.rows:
        if row.reason:
            reasons.setdefault(row.reason, []).append(row.recipe)
    lines += [f"Not tried: {', '.join(recipes)}: {reason}." for reason, recipes in reasons.items()]
    uncharged = dict.fromkeys(method for row in plan.rows for method in row.uncharged)
    if uncharged:
        lines.append(f"Coding that takes no time here, since the device has no rate: {', '.join(uncharged)}.")
    return lines
