"""Writes ``docs/results.md``, and what is measured in READMEs and ``docs/papers``: ``scripts/bench --pages``."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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

Each row is a fact about a commit: the last one that had changed the code when the row was measured. Later commits may
differ. A star marks rows whose commit is the one that stored them. Figures of virtual time are marked as simulated.

**Verdicts** compare with the figure that a source publishes. A row is *reproduced* where ours is as good within its
tolerance: 0.5 points, or 10 % of any other figure, unless `expected.toml` says otherwise. It is *better* or *worse*
where ours and its whole spread lie beyond, and *undecided* where the spread is wider than twice the tolerance.
*Not reached* is a target that ours missed: best and target stand in the place of the figure. *Not comparable* comes
with the reason below its table. A baseline counts as converged where twice its steps gain less than 0.5 points. *Goals*
are farflung's own and do not enter the verdict, and a *peer* is another system that was measured. Rows without a
published figure have no verdict.

## Six published systems

Each has [a page of its own](papers/index.md): equations, settings, all rows, and why ours differ.
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
    heads = ("system", "idea", "claim", "paper", "ours", "setting", "verdict", "commit, date")
    parts.append(
        _markdown(heads, [line for page, system in systems for line in _on_first_screen(page, system)])
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
                f"How it is measured, and why it differs: `benchmarks/{page.folder.name}/README.md`.\n"
            )
            parts.append(_rows_table(page.rows))
    return "\n".join(parts)


def generated(found: Sequence[Page]) -> Iterator[tuple[Path, str]]:
    """The pages that have a block of results, with the block: READMEs, and ``docs/papers``."""
    systems = [(page, page.system) for page in found if page.system is not None]
    heads = ("system", "idea", "claim", "paper", "ours", "verdict")
    lines = [
        (f"[{name}]({page.paper.name})" if name else "", *cells, verdict)
        for page, system in systems
        for name, *cells, _, verdict, _ in _on_first_screen(page, system)
    ]
    yield PAPERS / "index.md", _markdown(heads, lines)
    yield FRONT, _front(found)
    for page, _ in systems:
        yield page.paper, _paper(page)
    for page in found:
        yield page.folder / "README.md", _readme(page)


def _paper(page: Page) -> str:
    """The results that the page of a system shows: all rows, and how far they are from the published figures."""
    picture = (
        f"![Distance of each row from the paper's figure, in tolerances](../results_{page.folder.name}.png)"
    )
    return f"{_sentence(page.counts)}\n\n{picture}\n\n{_rows_table(page.rows)}"


def _readme(page: Page) -> str:
    """The results that the README of a benchmark shows: its headline rows, and counts of all verdicts."""
    headlines = [row for row in page.rows if row[0].headline]
    text = f"{_sentence(page.counts)} All rows: [results](../../docs/{page.rows_at}).\n"
    return f"{text}\n{_rows_table(headlines)}"


def _front(found: Sequence[Page]) -> str:
    """The table of the repository's README: a row of each system, and the verdicts on all rows of it."""
    lines = []
    for page in found:
        if page.system is None:
            continue
        row, result = next(each for each in page.rows if each[0].name == page.system.shown)
        others = ", ".join(
            f"{page.counts[verdict]} {verdict}" for verdict in VERDICTS if page.counts[verdict]
        )
        lines.append(
            (
                f"[{page.system.name}](docs/papers/{page.paper.name})",
                page.system.idea,
                f"{row.name} ({row.unit})",
                _figure(row.published),
                "" if result is None else _with_spread(result),
                f"**{judge(row, result)[0]}**<br>all rows: {others}",
            )
        )
    return _markdown(("system", "idea", "figure", "paper", "ours", "verdict"), lines)


def with_block(text: str, block: str) -> str:
    """A page with a block between its marks."""
    before, _, rest = text.partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        raise ValueError(f"the page has no lines '{BEGIN}' and '{END}'")
    return f"{before}{BEGIN}\n{block}\n{END}{after}"


def _on_first_screen(page: Page, system: System) -> Iterator[tuple[str, ...]]:
    """A line for each headline row with a published figure; system, idea and setting are said once."""
    heads = [row for row in page.rows if row[0].headline and row[0].published is not None]
    for place, (row, result) in enumerate(heads):
        verdict, reason = judge(row, result)
        yield (
            *((f"**{system.name}**", system.idea) if place == 0 else ("", "")),
            f"{row.name} ({row.unit})",
            f"{_figure(row.published)}<br>{row.at}",
            "" if result is None else _with_spread(result),
            row.note or (f"paper: {system.paper}<br>ours: {system.ours}" if place == 0 else ""),
            f"**{verdict}**" + (f": {reason}" if reason else ""),
            _commit(result),
        )


def _rows_table(rows: Sequence[tuple[Expected, Result | None]]) -> str:
    """A table of rows, and below it why those without a comparison have none."""
    lines, reasons = [], dict[str, list[str]]()
    peers = any(row.peer is not None for row, _ in rows)
    for row, result in rows:
        verdict, reason = judge(row, result)
        if reason:
            reasons.setdefault(f"{verdict}: {reason}", []).append(row.name)
        lines.append(
            (
                row.name,
                row.unit,
                _figure(row.published) + (f" ({row.at})" if row.at else ""),
                *((_figure(row.peer),) if peers else ()),
                "" if result is None else result.figure,
                "" if result is None else _spread(result),
                verdict,
                _figure(row.goal),
                _commit(result),
            )
        )
    heads = (
        "row",
        "unit",
        "paper",
        *(("peer",) if peers else ()),
        "ours",
        "spread",
        "verdict",
        "goal",
        "commit, date",
    )
    said = "".join(f"\n* {reason} ({'; '.join(names)})" for reason, names in reasons.items())
    return _markdown(heads, lines) + ("\n" + said + "\n" if said else "")


def _sentence(counts: Mapping[Verdict, int]) -> str:
    """How many rows have each verdict."""
    compared = sum(counts.get(verdict, 0) for verdict in VERDICTS)
    told = ", ".join(f"{counts[verdict]} {verdict}" for verdict in VERDICTS if counts.get(verdict))
    own = f"{counts.get('', 0)} rows have no published figure"
    return (
        f"{compared} rows with a published figure or without a result: {told}; {own}."
        if compared
        else f"{own}."
    )


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
    """Draws how far each row is from the published figure, in tolerances; to the right is better."""
    import matplotlib.pyplot as plt

    rows = [
        (row, result, verdict)
        for row, result in page.rows
        if result is not None and (verdict := judge(row, result)[0]) and row.published is not None
    ]
    figure, axes = plt.subplots(figsize=(9, 1.3 + 0.24 * len(rows)), layout="constrained")
    axes.axvspan(-1, 1, color="tab:green", alpha=0.12)
    axes.axvline(0, color="black", linewidth=0.8)
    for place, (row, result, verdict) in enumerate(reversed(rows)):
        _mark(axes, place, row, result, verdict)
    axes.set_xscale("symlog", linthresh=1)
    axes.set_yticks(range(len(rows)), [row.name for row, _, _ in reversed(rows)], fontsize=7)
    axes.set_xlabel("distance from the paper's figure, in tolerances (right: better)")
    axes.set_title(page.title, loc="left")
    axes.margins(x=0.08)
    for verdict in dict.fromkeys(verdict for _, _, verdict in rows):
        axes.plot([], [], **_style(verdict), label=verdict)
    figure.legend(loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    figure.savefig(path, dpi=110, metadata={"Software": None})
    plt.close(figure)


def _mark(axes: Axes, place: int, row: Expected, result: Result, verdict: Verdict) -> None:
    assert row.published is not None
    unit = row.within or 1.0
    sign = 1 if row.better == "higher" else -1
    if result.ours is None:
        axes.annotate(
            "target not reached", (0, place), (4, 0), textcoords="offset points", fontsize=7, va="center"
        )
        axes.plot(0, place, **_style(verdict))
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
        "markerfacecolor": "white" if hollow else color,
    }


def main() -> int:
    """Writes all pages; the exit code."""
    found = pages()
    PAGE.write_text(results_page(found), encoding="utf-8")
    for path, block in generated(found):
        path.write_text(with_block(path.read_text(encoding="utf-8"), block), encoding="utf-8")
    for page in found:
        if page.system is not None:
            pictured(page, PAGE.with_name(f"results_{page.folder.name}.png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
