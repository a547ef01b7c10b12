"""The command line of every benchmark: ``run.py [--quick] [--stored] [--json] [--only TEXT] [--again] [kinds]``."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.common.rows import (
    Expected,
    Stored,
    load_expected,
    load_stored,
    source_hash,
    store,
    verdict,
    versions,
)
from benchmarks.common.trainings import CannotTell, Trainings
from farflung.errors import FarflungError

__all__ = ["KINDS", "STOPPED", "Benchmark", "Flag", "Group", "Kind", "Kinds", "Measured", "main"]

Flag: TypeAlias = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Kind: TypeAlias = Literal["trainings", "simulated", "measured"]
KINDS: tuple[Kind, ...] = ("trainings", "simulated", "measured")
"""What rows are made of, in the order in which they are made: stored trainings, virtual time, this machine's time."""
FAILED, NOT_HERE, STOPPED = 1, 2, 130
"""Exit codes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What measuring brought for one row."""

    ours: float
    spread: tuple[float, float]
    config: dict[str, Any] = field(default_factory=dict)
    simulated: bool = False


Measure: TypeAlias = Callable[[bool], Mapping[str, Measured]]
"""Called with whether to be quick; measures one or several rows, named as in ``expected.toml``."""


@dataclass(frozen=True)
class Group:
    """Rows that are measured together.

    Args:
      rows: their names.
      measure: measures them.
      kind: what they are made of.
      minutes: an estimate; of a group of trainings, without these.
      sources: files that they depend on, as patterns relative to the repository; the benchmark's own are added.
    """

    rows: tuple[str, ...]
    measure: Measure
    kind: Kind
    minutes: float
    sources: Sequence[str]


@dataclass(frozen=True)
class Benchmark:
    """A folder with ``expected.toml`` and ``results``, and what measures its rows.

    Args:
      folder: of the benchmark.
      groups: of rows, in the order in which they are measured.
      trainings: that are stored beside the rows.
    """

    folder: Path
    groups: Sequence[Group]
    trainings: Trainings[Any, Any] | None = None

    @property
    def name(self) -> str:
        """That of its folder."""
        return self.folder.name

    def current(self, group: Group) -> str:
        """The hash of a group's sources as they are."""
        return source_hash([*group.sources, f"benchmarks/{self.name}/*.py"])

    def verdicts(self, results: Mapping[str, Stored] | None = None) -> dict[str, str]:
        """Of each expected row, by what is stored unless other results are given."""
        if results is None:
            results = load_stored(self.folder)
        current = {row: self.current(group) for group in self.groups for row in group.rows}
        return {
            row.name: verdict(row, results.get(row.name), current.get(row.name, ""))
            for row in load_expected(self.folder)
        }

    def due(self, kind: Kind) -> list[Group]:
        """Groups with a row that is missing or stale."""
        old = {row for row, verdict in self.verdicts().items() if verdict in {"missing", "stale"}}
        return [group for group in self.groups if group.kind == kind and old.intersection(group.rows)]


@dataclass(frozen=True)
class Kinds:
    """Which rows; all when none is named."""

    trainings: Flag = False
    """Accuracies of stored trainings, which are trained anew where their first steps end otherwise than before."""
    simulated: Flag = False
    """Virtual times."""
    measured: Flag = False
    """Times of this machine."""

    @property
    def chosen(self) -> tuple[Kind, ...]:
        """Those that are asked for."""
        return tuple(kind for kind in KINDS if getattr(self, kind)) or KINDS


@dataclass(frozen=True)
class Options(Kinds):
    """Measure against what is expected, row by row; rows measured before with the same sources are kept."""

    quick: Flag = False
    """Short runs, not stored: only to see that it works."""
    stored: Flag = False
    """Measure nothing, read the stored results."""
    json: Flag = False
    """Print the rows as JSON."""
    only: str = ""
    """Only rows whose name contains this."""
    again: Flag = False
    """Measure rows anew that are stored already."""


def main(benchmark: Benchmark, args: Sequence[str] | None = None) -> int:
    """Runs a benchmark.

    What fails or cannot be had on this machine is said and left out. Everything is stored as soon as it is there, so
    a run that was stopped goes on where it was.

    Args:
      benchmark: which.
      args: the command line; that of the process when not given.

    Returns:
      The exit code: 1 where a measurement failed, 2 where this machine or its data do not allow one, 130 where somebody
      stopped it.
    """
    options = tyro.cli(Options, prog=f"{benchmark.name}/run.py", args=args)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    expected = [row for row in load_expected(benchmark.folder) if options.only in row.name]
    results = {} if options.quick else load_stored(benchmark.folder)
    code = 0
    if not options.stored:
        try:
            code = _measure(benchmark, options, {row.name for row in expected}, results, console)
        except KeyboardInterrupt:
            console.print(f"{benchmark.name}: stopped; run again, it goes on from here")
            code = STOPPED
    verdicts = benchmark.verdicts(results)
    if options.json:
        rows = [_json_row(row, results.get(row.name), verdicts[row.name]) for row in expected]
        print(json.dumps({"rows": rows}))
    else:
        Console().print(_table(benchmark.name, expected, results, verdicts))
    return code


def _measure(
    benchmark: Benchmark, options: Options, names: set[str], results: dict[str, Stored], console: Console
) -> int:
    """Measures what is wanted, and adds it to the results; the exit code."""
    name, code = benchmark.name, 0
    if (
        benchmark.trainings is not None
        and "trainings" in options.chosen
        and not (options.quick or options.only)
    ):
        code = _renew(name, benchmark.trainings, console)
    verdicts = benchmark.verdicts(results)
    wanted = [
        group
        for group in benchmark.groups
        if group.kind in options.chosen
        and any(
            row in names and (options.again or verdicts[row] in {"missing", "stale"}) for row in group.rows
        )
    ]
    left = sum(group.minutes for group in wanted)
    for group in wanted:
        if not options.quick:
            console.print(f"{name}: about {left:.0f} minutes left; now {', '.join(group.rows)}")
        left -= group.minutes
        current = benchmark.current(group)
        try:
            found = group.measure(options.quick)
        except (FarflungError, RuntimeError) as error:
            code = max(code, _failed(name, error, console))
            continue
        for row, measured in found.items():
            results[row] = Stored(
                name=row,
                ours=measured.ours,
                spread=measured.spread,
                simulated=measured.simulated,
                sources=current,
                config=measured.config,
                versions=versions(),
                command=" ".join(sys.argv),
                when=time.strftime("%Y-%m-%d"),
            )
            if not options.quick:
                store(benchmark.folder, results[row])
    return code


def _renew(name: str, trainings: Trainings[Any, Any], console: Console) -> int:
    """Takes the first steps of all stored trainings that are due; the exit code."""
    due, code, began = trainings.due(), 0, time.monotonic()
    for number, training in enumerate(due):
        left = (
            f", about {(time.monotonic() - began) / number * (len(due) - number) / 60:.0f} minutes left"
            if number
            else ""
        )
        console.print(f"{name}: training {number + 1} of {len(due)} that are due{left}")
        try:
            trainings.accuracy(training)
        except (FarflungError, RuntimeError) as error:
            code = max(code, _failed(name, error, console))
            if not isinstance(error, CannotTell):  # the others would fail alike
                break
    return code


def _failed(name: str, error: Exception, console: Console) -> int:
    """Says what failed; the exit code."""
    not_here = isinstance(error, FarflungError)
    console.print(f"{name}: {error if not_here else traceback.format_exc()}")
    return NOT_HERE if not_here else FAILED


def _json_row(row: Expected, stored: Stored | None, verdict: str) -> dict[str, Any]:
    return {
        "name": row.name,
        "unit": row.unit,
        "published": row.published,
        "goal": row.goal,
        "ours": None if stored is None else stored.ours,
        "spread": None if stored is None else list(stored.spread),
        "simulated": bool(stored and stored.simulated),
        "verdict": verdict,
    }


def _table(
    title: str, expected: Sequence[Expected], results: Mapping[str, Stored], verdicts: Mapping[str, str]
) -> Table:
    table = Table(title=title, title_justify="left")
    for column in ("row", "unit", "published", "goal", "ours", "spread", "verdict"):
        table.add_column(column, justify="left" if column in {"row", "unit", "verdict"} else "right")
    for row in expected:
        stored = results.get(row.name)
        mark = " (simulated)" if stored is not None and stored.simulated else ""
        table.add_row(
            row.name,
            row.unit,
            _figure(row.published),
            _figure(row.goal),
            "" if stored is None else _figure(stored.ours) + mark,
            "" if stored is None else f"{_figure(stored.spread[0])} to {_figure(stored.spread[1])}",
            verdicts[row.name],
        )
    return table


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
