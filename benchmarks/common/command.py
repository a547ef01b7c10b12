"""The command line of every benchmark: ``run.py [--quick] [--stored] [--json] [--only TEXT] [--again] [kinds]``."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import tyro
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.common.provenance import changed_canaries, commit_here
from benchmarks.common.results import (
    NOT_RUN,
    Expected,
    Measured,
    Result,
    judge,
    load_expected,
    load_results,
    row_json,
    store,
)
from benchmarks.common.trainings import Trainings
from farflung.errors import DataMissing, FarflungError, MissingExtra

__all__ = ["KINDS", "STOPPED", "Benchmark", "Flag", "Group", "Kind", "Kinds", "main"]

Flag: TypeAlias = Annotated[bool, tyro.conf.FlagCreatePairsOff]
Kind: TypeAlias = Literal["trainings", "simulated", "measured"]
KINDS: tuple[Kind, ...] = ("trainings", "simulated", "measured")
"""What rows are made of, in the order in which they are made: stored trainings, virtual time, this machine's time."""
FAILED, NOT_HERE, STOPPED = 1, 2, 130
"""Exit codes."""

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
      battery: names of the cases of ``tests/battery`` that cover the code behind the rows.
    """

    rows: tuple[str, ...]
    measure: Measure
    kind: Kind
    minutes: float
    battery: Sequence[str]


@dataclass(frozen=True)
class Benchmark:
    """A folder with ``expected.toml`` and ``results``, and the measurements of its rows.

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

    def due(self, kinds: Sequence[Kind], commit: str, results: Mapping[str, Result]) -> list[Group]:
        """Groups with a row that was not measured at a commit, or of trainings one whose canary has changed since."""
        return [
            group
            for group in self.groups
            if group.kind in kinds and any(_is_due(group, results.get(row), commit) for row in group.rows)
        ]


def _is_due(group: Group, result: Result | None, commit: str) -> bool:
    if result is None:
        return True
    if group.kind == "trainings":
        return bool(changed_canaries(group.battery, result.commit))
    return result.commit != commit


@dataclass(frozen=True)
class Kinds:
    """Which rows; all when none is named."""

    trainings: Flag = False
    """Rows of stored trainings; one is trained again where a canary has changed since."""
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
    """Measure the rows of a benchmark; those that this commit of the code has measured already are kept."""

    quick: Flag = False
    """One short run of each measurement, not stored, to see that it works. Its figures mean nothing."""
    stored: Flag = False
    """Measure nothing, read the stored results."""
    json: Flag = False
    """Print the rows as JSON."""
    only: str = ""
    """Only rows whose name contains this."""
    again: Flag = False
    """Measure rows anew that this commit has measured already."""


def main(benchmark: Benchmark, args: Sequence[str] | None = None) -> int:
    """Runs a benchmark.

    A measurement that fails or that this machine does not allow is reported and left out. Each result is stored as
    soon as it is there, so a run that was stopped goes on where it was.

    Args:
      benchmark: which.
      args: the command line; that of the process when not given.

    Returns:
      The exit code: 1 where a measurement failed, 2 where this machine, its data or uncommitted code do not allow one,
      130 after Ctrl-C.
    """
    options = tyro.cli(Options, prog=f"{benchmark.name}/run.py", args=args)
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    expected = {row.name: row for row in load_expected(benchmark.folder)}
    results = {} if options.quick else load_results(benchmark.folder)
    code = 0
    if not options.stored:
        try:
            code = _measure(benchmark, options, expected, results, console)
        except FarflungError as error:
            code = _failed(benchmark.name, error, console)
        except KeyboardInterrupt:
            console.print(f"{benchmark.name}: stopped; run again, it goes on from here")
            code = STOPPED
    shown = [row for name, row in expected.items() if options.only in name]
    if options.json:
        rows = [row_json(row, results.get(row.name), quick=options.quick) for row in shown]
        print(json.dumps({"rows": rows}))
    elif options.quick:
        print("quick: shows that everything runs; figures mean nothing, so none are shown")
        Console().print(_quick_table(benchmark.name, shown, results))
    else:
        Console().print(_table(benchmark.name, shown, results))
    return code


def _measure(
    benchmark: Benchmark,
    options: Options,
    expected: Mapping[str, Expected],
    results: dict[str, Result],
    console: Console,
) -> int:
    """Measures what is due, and adds it to the results; the exit code."""
    name, code = benchmark.name, 0
    commit = "" if options.quick else commit_here()
    groups = [group for group in benchmark.groups if group.kind in options.chosen]
    if not options.quick and not options.again:
        groups = benchmark.due(options.chosen, commit, results)
    groups = [group for group in groups if any(options.only in row for row in group.rows)]
    if options.quick:
        groups = list({_function(group.measure): group for group in reversed(groups)}.values())[::-1]
    left = sum(group.minutes for group in groups)
    for group in groups:
        if not options.quick:
            console.print(f"{name}: about {left:.0f} minutes left; now {', '.join(group.rows)}")
        left -= group.minutes
        if benchmark.trainings is not None:
            benchmark.trainings.used.clear()
        began = time.monotonic()
        try:
            found = group.measure(options.quick)
        except (DataMissing, MissingExtra) as error:
            code = max(code, 0 if options.quick else _failed(name, error, console))
            continue
        except (FarflungError, RuntimeError) as error:
            code = max(code, _failed(name, error, console))
            continue
        seconds = time.monotonic() - began
        new = {
            row: _of_trainings(
                benchmark,
                Result.of(expected[row], one, commit=commit, battery=group.battery, seconds=seconds),
            )
            for row, one in found.items()
        }
        results.update(new)
        if not options.quick:
            store(benchmark.folder, new)
    return code


def _function(measure: Measure) -> object:
    """The function behind a measurement, whatever its settings."""
    return measure.func if isinstance(measure, partial) else measure


def _of_trainings(benchmark: Benchmark, result: Result) -> Result:
    """A row is as old as the oldest training in it."""
    if benchmark.trainings is None or not benchmark.trainings.used:
        return result
    oldest = min(benchmark.trainings.used, key=lambda line: line.date)
    if oldest.date >= result.date:
        return result
    return replace(
        result,
        commit=oldest.commit,
        date=oldest.date,
        machine=oldest.machine,
        stored_by_commit=oldest.stored_by_commit,
    )


def _failed(name: str, error: Exception, console: Console) -> int:
    """Reports a failure; the exit code."""
    not_here = isinstance(error, FarflungError)
    console.print(f"{name}: {error if not_here else traceback.format_exc()}")
    return NOT_HERE if not_here else FAILED


def _table(title: str, expected: Sequence[Expected], results: Mapping[str, Result]) -> Table:
    """Returns the rows; cells have a second line, so that 80 columns have room for them."""
    table = _rows_table(title, published="right", ours="right", verdict="left")
    for row in expected:
        result = results.get(row.name)
        published = [_figure(row.published), "" if row.goal is None else f"goal {_figure(row.goal)}"]
        ours: list[str] = []
        verdict: list[str] = [judge(row, result)[0]]
        if result is not None:
            spread = "" if result.low is None else f"{_figure(result.low)} to {_figure(result.high)}"
            ours = [*result.figure.replace(" (", "\n(").split(", "), spread]
            verdict += [result.commit[:8], result.date]
        cells = ([row.name, f"({row.unit})"], published, ours, verdict)
        table.add_row(*(Text("\n".join(filter(None, cell))) for cell in cells))
    return table


def _quick_table(title: str, expected: Sequence[Expected], results: Mapping[str, Result]) -> Table:
    """Returns which rows have run, without their figures."""
    table = _rows_table(title, ran="left")
    for row in expected:
        result = results.get(row.name)
        table.add_row(Text(row.name), NOT_RUN if result is None else f"yes, {result.seconds:.1f} s")
    return table


def _rows_table(title: str, **columns: Literal["left", "right"]) -> Table:
    table = Table(title=Text(title), title_justify="left", show_lines=True)
    table.add_column("row", overflow="fold")
    for name, justify in columns.items():
        table.add_column(name, justify=justify, no_wrap=True)
    return table


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
