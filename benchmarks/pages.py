"""Writes ``docs/results.md``, and what is measured in READMEs and ``docs/papers``: ``scripts/bench --pages``."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from benchmarks.common.pictures import create_drawing
from benchmarks.common.provenance import ROOT
from benchmarks.common.results import (
    Expected,
    Result,
    System,
    Verdict,
    judge,
    load_expected,
    load_results,
    load_system,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = [
    "FRONT",
    "PAGE",
    "PAPERS",
    "Page",
    "generated",
    "main",
    "pages",
    "pictured",
    "results_page",
    "with_block",
]

PAGE = ROOT / "docs" / "results.md"
FRONT = ROOT / "README.md"
PAPERS = ROOT / "docs" / "papers"
UNGROUPED, SMALLEST_GROUP = 20, 3
"""Rows of a page that one table shows; with more, rows of one unit and network have a table, if they are so many."""
CLAIMS = ("claim", "verdict", "paper", "ours")
BEGIN, END = "<!-- results: written by scripts/bench --pages -->", "<!-- end of results -->"
VERDICTS: tuple[Verdict, ...] = (
    "reproduced",
    "better",
    "worse",
    "not reached",
    "undecided",
    "not comparable",
    "not run",
)
GREY = "#888888"
COLUMN = 0.23
"""Width of the column of targets that were not reached, as a share of the picture's."""
COLORS: Mapping[Verdict, str] = {
    "reproduced": "tab:green",
    "better": "tab:blue",
    "worse": "tab:red",
    "not reached": "tab:red",
    "undecided": "tab:olive",
    "not comparable": "tab:gray",
}
FOREWORD = """# Results

{counts}

A row states what one commit did: the last commit that had changed the code when the row was measured. Later commits may
differ. A star marks rows whose commit is the one that stored them. Rows in virtual time are marked as simulated.

**Verdicts** compare our figure with the one that a source publishes. By default a difference counts as none up to 0.5
points, or up to 10 % of any other figure; `expected.toml` may set another tolerance.

| verdict | meaning |
| --- | --- |
| **reproduced** | our figure is within the tolerance |
| **better**, **worse** | our figure and its whole spread are beyond the tolerance |
| **undecided** | the spread is wider than twice the tolerance |
| **not reached** | our training missed the target; the table gives its best score and the target |
| **not comparable** | the settings differ in a way that matters; the reason is below the table |
| **not run** | we do not have the data, or have not measured it yet |

A baseline counts as converged if twice as many steps gain less than 0.5 points. *Goals* are farflung's own and do not
enter the verdict. A *peer* is another system that we measured. Rows without a published figure have no verdict.

## Six published systems

Each has [its own page](papers/index.md) with equations, settings, all rows, and why our figures differ.
"""


class Page(NamedTuple):
    """A benchmark, as the pages show it.

    Args:
      folder: of the benchmark.
      system: that it reproduces, if it is one of the six.
      rows: that are expected, with their results.
    """

    folder: Path
    system: System | None
    rows: Sequence[tuple[Expected, Result | None]]

    @property
    def title(self) -> str:
        """The first line of the README."""
        return (self.folder / "README.md").read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")

    @property
    def paper(self) -> Path:
        """The page of the system."""
        return PAPERS / f"{self.folder.name}.md"

    @property
    def rows_at(self) -> str:
        """Where all rows are, from the folder of the documentation."""
        return f"results.md#{_anchor(self)}" if self.system is None else f"papers/{self.paper.name}"

    @property
    def counts(self) -> Counter[Verdict]:
        """How many rows have each verdict."""
        return Counter(judge(*row)[0] for row in self.rows)


def pages() -> list[Page]:
    """All benchmarks: those of the six systems first, then by name."""
    found = []
    for path in sorted(ROOT.glob("benchmarks/*/expected.toml")):
        results = load_results(path.parent)
        rows = [(row, results.get(row.name)) for row in load_expected(path.parent)]
        found.append(Page(path.parent, load_system(path.parent), rows))
    return sorted(found, key=lambda page: page.system is None)


def results_page(found: Sequence[Page]) -> str:
    """The text of ``docs/results.md``."""
    parts = [FOREWORD.format(counts=_sentence(sum((page.counts for page in found), Counter())))]
    systems = [(page, page.system) for page in found if page.system is not None]
    parts.append(
        _markdown(
            CLAIMS, [line for page, system in systems for line in _claims(page, system, folder="papers/")]
        )
    )
    lines = [
        (
            f"[{page.title}]({page.rows_at.removeprefix(PAGE.name)})",
            *(str(page.counts[verdict] or "") for verdict in VERDICTS),
        )
        for page in found
    ]
    parts.append("\n## Counts\n\n" + _markdown(("", *VERDICTS), lines, align="r"))
    for page in found:
        if page.system is None:
            parts.append(f"\n({_anchor(page)})=\n## {page.title}\n")
            parts.append(
                f"How we measured it, and why figures differ: `benchmarks/{page.folder.name}/README.md`.\n"
            )
            parts.append(_rows_table(page.rows))
    return "\n".join(parts)


def generated(found: Sequence[Page]) -> Iterator[tuple[Path, str]]:
    """The pages that have a block of results, with the block: READMEs, and ``docs/papers``."""
    systems = [(page, page.system) for page in found if page.system is not None]
    lines = [line for page, system in systems for line in _claims(page, system)]
    yield PAPERS / "index.md", _markdown(CLAIMS, lines)
    yield FRONT, _front(found)
    for page, _ in systems:
        yield page.paper, _paper(page)
    for page in found:
        yield page.folder / "README.md", _readme(page)


def _paper(page: Page) -> str:
    """The results that the page of a system shows: all rows, and how far they are from the published figures."""
    picture = (
        f"![Distance of each row from the paper's figure, in tolerances](../results_{page.folder.name}.svg)"
    )
    return f"{_sentence(page.counts)}\n\n{picture}\n\n{_rows_table(page.rows)}"


def _readme(page: Page) -> str:
    """The results that the README of a benchmark shows: its headline rows, and counts of all verdicts."""
    headlines = [row for row in page.rows if row[0].headline]
    text = f"{_sentence(page.counts)} All rows: [results](../../docs/{page.rows_at}).\n"
    return f"{text}\n{_rows_table(headlines)}"


def _front(found: Sequence[Page]) -> str:
    """The table of the repository's README: claims of each system, and the verdicts on all rows."""
    lines, counts = [], Counter[Verdict]()
    for page in found:
        if page.system is None:
            continue
        counts += page.counts
        rows = {row.name: (row, result) for row, result in page.rows}
        name = f"[{page.system.name}](docs/papers/{page.paper.name})"
        for shown, claim in page.system.shown.items():
            row, result = rows[shown]
            ours = "" if result is None else _with_spread(result)
            lines.append((name, claim, f"**{judge(row, result)[0]}**", _figure(row.published), ours))
            name = ""
    table = _markdown(("system", "claim", "verdict", "its source", "ours"), lines)
    return f"{table}\nAll rows of the six: {_list_counts(counts)}."


def with_block(text: str, block: str) -> str:
    """A page with a block between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no lines '{BEGIN}' and '{END}'")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def _claims(page: Page, system: System, *, folder: str = "") -> Iterator[tuple[str, ...]]:
    """Yields a line for each headline row with a published figure; the first one names the system.

    Args:
      page: of the system.
      system: whose rows they are.
      folder: of the page, from that of the table.
    """
    heads = [row for row in page.rows if row[0].headline and row[0].published is not None]
    for place, (row, result) in enumerate(heads):
        verdict, reason = judge(row, result)
        name = "" if place else f"**[{system.name}]({folder}{page.paper.name})**<br>"
        setting = row.note or ("" if place else f"paper: {system.paper}; ours: {system.ours}")
        details = "<br>".join(
            filter(
                None,
                (setting.replace("; ours:", "<br>ours:"), reason and f"{verdict}: {reason}", _commit(result)),
            )
        )
        yield (
            f"{name}{row.name} ({row.unit}) <details><summary>setting</summary>{details}</details>",
            f"**{verdict}**",
            f"{_figure(row.published)}<br>{row.at}",
            "" if result is None else _with_spread(result),
        )


def _rows_table(rows: Sequence[tuple[Expected, Result | None]]) -> str:
    """The rows in tables, and below them why some are not compared and which have not been run."""
    reasons = dict[str, list[str]]()
    for row, result in rows:
        verdict, reason = judge(row, result)
        if reason:
            published = f", paper {_figure(row.published)}" if result is None and row.published else ""
            reasons.setdefault(f"{verdict}: {reason}", []).append(row.name + published)
    groups = dict[str, list[tuple[Expected, Result | None]]]()
    for row, result in rows:
        if result is not None or not judge(row, result)[1]:
            groups.setdefault(_group(row) if len(rows) > UNGROUPED else "", []).append((row, result))
    others = [pair for group in groups.values() if len(group) < SMALLEST_GROUP for pair in group]
    parts = [
        (f"**{group[:1].upper()}{group[1:]}**\n\n" if group else "") + _table(pairs, has_units=not group)
        for group, pairs in groups.items()
        if len(pairs) >= SMALLEST_GROUP
    ]
    if others:
        parts.append(("**Other rows**\n\n" if parts else "") + _table(others, has_units=True))
    if reasons:
        parts.append("".join(f"* {reason} ({'; '.join(names)})\n" for reason, names in reasons.items()))
    return "\n".join(parts)


def _group(row: Expected) -> str:
    """The unit of a row, and the network that its name ends with."""
    network = re.search(r" at (\d+ [MG]bit/s)$", row.name)
    return f"{row.unit}, {network[1]}" if network else row.unit


def _table(rows: Sequence[tuple[Expected, Result | None]], *, has_units: bool) -> str:
    columns: dict[str, list[str]] = {
        "row": [row.name for row, _ in rows],
        "verdict": [f"**{verdict}**" if (verdict := judge(*pair)[0]) else "" for pair in rows],
        "unit": [row.unit for row, _ in rows] if has_units else [],
        "paper": [_figure(row.published) + (f" ({row.at})" if row.at else "") for row, _ in rows],
        "peer": [_figure(row.peer) for row, _ in rows],
        "ours": ["" if result is None else result.figure for _, result in rows],
        "spread": ["" if result is None else _spread(result) for _, result in rows],
        "goal": [_figure(row.goal) for row, _ in rows],
        "commit, date": [_commit(result) for _, result in rows],
    }
    columns = {name: cells for name, cells in columns.items() if any(cells)}
    return _markdown([*columns], [*zip(*columns.values(), strict=True)])


def _sentence(counts: Mapping[Verdict, int]) -> str:
    """How many rows have each verdict."""
    compared = sum(counts.get(verdict, 0) for verdict in VERDICTS)
    others = f"{counts.get('', 0)} rows have no published figure"
    if not compared:
        return f"{others}."
    return f"{compared} rows with a published figure or without a result: {_list_counts(counts)}; {others}."


def _list_counts(counts: Mapping[Verdict, int]) -> str:
    return ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts.get(verdict))


def _anchor(page: Page) -> str:
    return f"results-{page.folder.name.replace('_', '-')}"


def _spread(result: Result) -> str:
    return "" if result.low in (None, result.high) else f"{_figure(result.low)} to {_figure(result.high)}"


def _with_spread(result: Result) -> str:
    return "<br>".join(part for part in (result.figure, _spread(result)) if part)


def _commit(result: Result | None) -> str:
    if result is None:
        return ""
    return f"`{result.commit[:7]}`{'*' if result.stored_by_commit else ''}, {result.date}"


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]], *, align: str = "l") -> str:
    rule = ["---", *(("---:" if align == "r" else "---") for _ in heads[1:])]
    cells = ([cell.replace("|", "\\|") for cell in line] for line in (heads, rule, *lines))
    return "".join(f"| {' | '.join(line)} |\n" for line in cells)


# --- pictures ---------------------------------------------------------------------------------------------------


def pictured(page: Page, path: Path) -> None:
    """Draws how far each row is from the published figure, in tolerances; to the right is better.

    Targets that were not reached have no distance: they are in a column of their own at the left edge.
    """
    rows = [
        (row, result, verdict)
        for row, result in page.rows
        if result is not None and (verdict := judge(row, result)[0]) and row.published is not None
    ]
    with create_drawing(path, (8.5, 1.5 + 0.26 * len(rows))) as figure:
        axes = figure.subplots()
        axes.axvspan(-1, 1, color="tab:green", alpha=0.15)
        axes.axvline(0, color="black", linewidth=0.8)
        axes.set_xscale("symlog", linthresh=1)
        axes.grid(visible=False, axis="y")
        for place, (row, result, verdict) in enumerate(reversed(rows)):
            _mark(axes, place, row, result, verdict)
        axes.set_yticks(range(len(rows)), [row.name for row, _, _ in reversed(rows)], fontsize=8)
        axes.set_ylim(-0.7, len(rows) - 0.3)
        axes.set_xlabel("distance from the paper's figure, in tolerances (right: better)")
        axes.margins(x=0.08)
        if any(result.ours is None for _, result, _ in rows):
            axes.set_xlim(left=min(20 * axes.get_xlim()[0], -10))  # the column has no points
            axes.fill_between(
                [0, COLUMN], 0, 1, transform=axes.transAxes, color=GREY, alpha=0.12, linewidth=0
            )
        for verdict in dict.fromkeys(
            verdict for _, result, verdict in rows if result.ours is not None or verdict == "not reached"
        ):
            axes.plot([], [], **_style(verdict), label=verdict)
        figure.legend(loc="outside lower center", ncols=4)


def _mark(axes: Axes, place: int, row: Expected, result: Result, verdict: Verdict) -> None:
    assert row.published is not None
    unit = row.within or 1.0
    sign = 1 if row.better == "higher" else -1
    if result.ours is None:
        edge = axes.get_yaxis_transform()
        axes.plot(0.012, place, **_style(verdict), transform=edge)
        axes.text(0.025, place, "target not reached", transform=edge, fontsize=8, color=GREY, va="center")
        return
    ours, low, high = (
        sign * ((result.ours if figure is None else figure) - row.published) / unit
        for figure in (result.ours, result.low, result.high)
    )
    axes.plot([low, high], [place, place], color=COLORS[verdict], linewidth=1)
    axes.plot(ours, place, **_style(verdict))


def _style(verdict: Verdict) -> dict[str, Any]:
    hollow = verdict in {"not comparable", "not reached"}
    color = COLORS[verdict]
    return {
        "marker": "x" if verdict == "not reached" else "o",
        "linestyle": "none",
        "color": color,
        "markerfacecolor": "none" if hollow else color,
    }


def main() -> int:
    """Writes all pages; the exit code."""
    found = pages()
    PAGE.write_text(results_page(found), encoding="utf-8")
    for path, block in generated(found):
        path.write_text(with_block(path.read_text(encoding="utf-8"), block), encoding="utf-8")
    for page in found:
        if page.system is not None:
            pictured(page, PAGE.with_name(f"results_{page.folder.name}.svg"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
