"""The tables of the README, by what is stored: ``python -m benchmarks.mercury.table`` writes them."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import Expected, Result, load_expected, load_results
from benchmarks.mercury.plan import MOST_HOURS, made_up, plan
from benchmarks.mercury.rows import JOBS, why_missing

__all__ = ["FOLDER", "ROWS", "TRAININGS", "main", "rows_table", "trainings_table", "with_table"]

FOLDER = Path(__file__).parent
ROWS, TRAININGS = "rows", "trainings"
"""What the tables are of, as their marks say."""
UNTRAINED = "missing: trainings"


def rows_table(expected: Sequence[Expected], stored: Mapping[str, Result]) -> str:
    """In Markdown: each row, with what its configuration says of others than the published rate."""
    heads = [
        "row",
        "published",
        "ours",
        "in steps",
        "to 5 points less",
        "uniform at its best rate",
        "both at their best",
    ]
    lines = [heads, ["---", *("---:" for _ in heads[1:])]]
    for row in expected:
        found = stored.get(row.name)
        ours = why_missing(row.name) or UNTRAINED if found is None else f"{found.ours:.3g}"
        config: Mapping[str, Any] = {} if found is None else found.config
        figures = [
            config.get("gain_in_steps"),
            config.get("to_5_points_less"),
            config.get("against_uniform_at_its_best_rate", {}).get("times_faster"),
            config.get("at_its_best_rate", {}).get("against_uniform_at_its_best_rate"),
        ]
        published = "" if row.published is None else f"{row.published:g}"
        lines.append([row.name, published, ours, *map(_mean, figures)])
    return _markdown(lines)


def trainings_table() -> str:
    """In Markdown: what there would be to train, were nothing stored."""
    heads = ["trainings", "what", "count", "minutes each", "minutes"]
    lines = [heads, ["---", "---", *("---:" for _ in heads[2:])]]
    found = plan([], made_up)
    for one in found:
        count = len(one.trainings)
        each = f"{one.minutes / count:.1f}"
        lines.append([f"`{one.name}`", JOBS[one.name].what, str(count), each, f"{one.minutes:.0f}"])
    count, hours = sum(len(one.trainings) for one in found), sum(one.minutes for one in found) / 60
    lines.append(["all", f"{hours:.1f} hours; {MOST_HOURS:g} at most", str(count), "", f"{60 * hours:.0f}"])
    return _markdown(lines)


def _mean(figures: Sequence[float] | None) -> str:
    return "" if figures is None else f"{statistics.fmean(figures):.3g}"


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def with_table(text: str, name: str, table: str) -> str:
    """A page with a table between its marks."""
    begin = f"<!-- {name}: written by python -m benchmarks.mercury.table -->"
    end = f"<!-- end of {name} -->"
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n{table}\n{end}{after}"


def main() -> int:
    """Writes them into the README; the exit code."""
    page = FOLDER / "README.md"
    text = with_table(page.read_text(encoding="utf-8"), TRAININGS, trainings_table())
    text = with_table(text, ROWS, rows_table(load_expected(FOLDER), load_results(FOLDER)))
    page.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
