"""Table of a plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from farflung.report.tables import create_table, format_duration

if TYPE_CHECKING:
    from rich.table import Table

    from farflung.planning.planner import Plan, PlanRow

__all__ = ["format_gap", "render_plan_table"]

RECIPE_WIDTH = 26


def render_plan_table(plan: Plan) -> Table:
    """Renders a plan as a table of at most 80 characters, with its advice below.

    Raises:
      MissingExtra: rich is not installed.
    """
    title = (
        f"Simulated. For what {plan.reference} comes to in {plan.steps:,} steps, "
        f"less {format_gap(plan.tolerance, plan.is_accuracy)}."
    )
    table = create_table(title, caption_justify="left", width=80)
    from rich.filesize import decimal
    from rich.text import Text

    table.add_column("recipe", overflow="fold", width=RECIPE_WIDTH)
    table.add_column("a step", justify="right", no_wrap=True)
    table.add_column("waits", justify="right")
    table.add_column("short by", justify="right")
    table.add_column("to the target", justify="right")
    table.add_column("sent", justify="right")
    for row in plan.rows:
        if row.step_s is None:
            continue
        gap = "" if row.gap is None or row.noise is None else format_gap(row.gap, plan.is_accuracy, row.noise)
        cells = (
            row.recipe,
            format_duration(row.step_s),
            f"{row.waiting:.0%}",
            gap,
            _format_time(row),
            "" if row.sent_nbytes is None else decimal(int(row.sent_nbytes)),
        )
        table.add_row(*map(Text, cells), style="bold" if row is plan.choice else None)
    table.caption = Text("\n".join(_list_advice(plan)), style="default")
    return table


def format_gap(gap: float, is_accuracy: bool, noise: float | None = None) -> str:
    """Formats a difference of scores, in points if they are accuracies, with its noise."""
    factor, unit = (100, " points") if is_accuracy else (1, "")
    figures = f"{factor * gap:.2g}" if noise is None else f"{factor * gap:.2g} ±{factor * noise:.1g}"
    return f"{figures}{unit}"


def _format_time(row: PlanRow) -> str:
    if row.high_s is None:
        return {"misses": "misses it", "slower": "later", "untried": "not tried"}[row.status]
    if row.low_s is None:
        return f"at most {format_duration(row.high_s)}"
    return f"{format_duration(row.low_s)} to {format_duration(row.high_s)}"


def _list_advice(plan: Plan) -> Sequence[str]:
    """Lists what to take, with what else is as good, and what the figures leave out."""
    choice, reference = plan.choice, next(row for row in plan.rows if row.recipe == plan.reference)
    lines = [f"Take {choice.recipe}."]
    if choice is not reference and choice.step_s and reference.step_s:
        lines[0] = (
            f"Take {choice.recipe}: its steps take 1/{reference.step_s / choice.step_s:.2g} of {plan.reference}'s."
        )
    if plan.similar:
        lines.append(
            f"As fast, as far as a simulation can say: {', '.join(row.recipe for row in plan.similar)}."
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
