"""The command line of every benchmark: ``run.py [--quick] [--stored] [--json] [--only TEXT] [--again]``."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeAlias

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
from farflung.errors import FarflungError

__all__ = ["Measured", "main"]

Flag: TypeAlias = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclass(frozen=True, slots=True)
class Measured:
    """What measuring brought for one row."""

    ours: float
    spread: tuple[float, float]
    config: dict[str, Any] = field(default_factory=dict)
    simulated: bool = False


@dataclass(frozen=True)
class Options:
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


Measure: TypeAlias = Callable[[bool], Mapping[str, Measured]]
"""Called with whether to be quick; measures one or several rows, named as in ``expected.toml``."""


def main(
    folder: Path,
    measures: Mapping[tuple[str, ...], Measure],
    *,
    sources: Sequence[str],
    minutes: Mapping[tuple[str, ...], float],
    args: Sequence[str] | None = None,
) -> int:
    """Runs a benchmark.

    Args:
      folder: of the benchmark.
      measures: for each group of rows, what measures it.
      sources: files that the results depend on, as patterns relative to the repository.
      minutes: an estimate for each group.
      args: the command line; that of the process when not given.

    Returns:
      The exit code: 2 where this machine or its data do not allow a measurement.
    """
    options = tyro.cli(Options, prog=f"{folder.name}/run.py", args=args)
    console = Console(stderr=True)
    expected = [row for row in load_expected(folder) if options.only in row.name]
    current = source_hash([*sources, f"benchmarks/{folder.name}/*.py"])
    results = {} if options.quick else load_stored(folder)
    names = {row.name for row in expected}

    if not options.stored:
        wanted = [
            group
            for group in measures
            if any(name in names and (options.again or _is_old(results.get(name), current)) for name in group)
        ]
        left = sum(minutes[group] for group in wanted)
        for group in wanted:
            if not options.quick:
                console.print(
                    f"{folder.name}: about {left:.0f} minutes left; now {', '.join(group)}", highlight=False
                )
            try:
                found = measures[group](options.quick)
            except FarflungError as error:
                console.print(f"{folder.name}: {error}", highlight=False, markup=False, soft_wrap=True)
                return 2
            for name, measured in found.items():
                row = Stored(
                    name=name,
                    ours=measured.ours,
                    spread=measured.spread,
                    simulated=measured.simulated,
                    sources=current,
                    config=measured.config,
                    versions=versions(),
                    command=" ".join(sys.argv),
                    when=time.strftime("%Y-%m-%d"),
                )
                results[name] = row
                if not options.quick:
                    store(folder, row)
            left -= minutes[group]

    if options.json:
        print(json.dumps({"rows": [_json_row(row, results.get(row.name), current) for row in expected]}))
    else:
        Console().print(_table(folder.name, expected, results, current))
    return 0


def _is_old(row: Stored | None, current: str) -> bool:
    return row is None or row.sources != current


def _json_row(row: Expected, stored: Stored | None, current: str) -> dict[str, Any]:
    return {
        "name": row.name,
        "unit": row.unit,
        "published": row.published,
        "goal": row.goal,
        "ours": None if stored is None else stored.ours,
        "spread": None if stored is None else list(stored.spread),
        "simulated": bool(stored and stored.simulated),
        "verdict": verdict(row, stored, current),
    }


def _table(title: str, expected: Sequence[Expected], results: Mapping[str, Stored], current: str) -> Table:
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
            verdict(row, stored, current),
        )
    return table


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
