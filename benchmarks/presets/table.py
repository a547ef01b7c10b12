"""The table of all presets, from what is stored: ``python -m benchmarks.presets.table`` writes it into the README."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.common.results import load_results
from benchmarks.presets.courses import WITHIN, Course, first_at
from benchmarks.presets.methods import NETWORKS, REFERENCE

__all__ = ["BEGIN", "END", "FOLDER", "WHOLE", "main", "table", "with_table"]

FOLDER = Path(__file__).parent
WHOLE = f"bytes to within {WITHIN:g} of synchronous's best loss, best preset"
"""The row that knows of all trainings."""
BEGIN, END = "<!-- table: written by python -m benchmarks.presets.table -->", "<!-- end of table -->"
NEVER, ELSEWHERE = "never", ""


def table(courses: Sequence[Course], target: float) -> str:
    """In Markdown: hours and gains are times of the reference over those of each.

    Args:
      courses: of all presets.
      target: the loss that bytes and times to it are of.
    """
    reference = next(course for course in courses if course.preset == REFERENCE)
    theirs = first_at(reference, target)
    assert theirs is not None
    heads = [
        "preset", "rate", "loss", "MB sent", f"to {target:.2f}: bytes",
        *(f"{network}: hours" for network in NETWORKS),
        *(f"to {target:.2f}, {network}" for network in NETWORKS),
    ]  # fmt: skip
    lines = [heads, ["---", *("---:" for _ in heads[1:])]]
    for course in courses:
        last, there = course.points[-1], first_at(course, target)
        lines.append(
            [
                f"`{course.preset}`",
                f"{course.learning_rate:g}",
                f"{course.loss:.3f}",
                f"{last.sent / 1e6:,.0f}",
                NEVER if there is None else f"{theirs.sent / there.sent:.3g} x",
                *(_hours(last.seconds, network) for network in NETWORKS),
                *(
                    ELSEWHERE
                    if network not in course.networks
                    else NEVER
                    if there is None
                    else f"{theirs.seconds[network] / there.seconds[network]:.3g} x"
                    for network in NETWORKS
                ),
            ]
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _hours(seconds: Mapping[str, float], network: str) -> str:
    return f"{seconds[network] / 3600:.2f}" if network in seconds else ELSEWHERE


def with_table(text: str, table: str) -> str:
    """A page with the table between its marks."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def main() -> int:
    """Writes it into the README; the exit code."""
    row = load_results(FOLDER).get(WHOLE)
    if row is None:
        print("nothing is stored yet: scripts/bench presets", file=sys.stderr)
        return 1
    config: Mapping[str, Any] = row.config
    page = FOLDER / "README.md"
    found = table([Course.from_json(one) for one in config["courses"]], config["target"])
    page.write_text(with_table(page.read_text(encoding="utf-8"), found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
