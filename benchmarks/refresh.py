"""Makes the rows of all benchmarks fresh: ``scripts/bench --all [--trainings] [--simulated] [--measured]``."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import tyro
from rich.console import Console
from rich.table import Table

from benchmarks.common import Benchmark
from benchmarks.common.command import NOT_HERE, STOPPED, Flag, Kind, Kinds
from benchmarks.common.rows import ROOT, load_stored

__all__ = ["Part", "every_benchmark", "main", "parts"]


@dataclass(frozen=True)
class Part:
    """What a benchmark has of one kind.

    Args:
      benchmark: which.
      kind: of rows.
      fresh: names of the rows that hold.
      due: those that do not, each with the reason.
      stored: how many trainings are stored.
      unsure: how many of them have to take their first steps.
    """

    benchmark: Benchmark
    kind: Kind
    fresh: Sequence[str]
    due: Mapping[str, str]
    stored: int
    unsure: int

    @property
    def minutes(self) -> float:
        """An estimate of what it takes to make all of it fresh, if stored trainings hold."""
        rows = sum(group.minutes for group in self.benchmark.due(self.kind))
        trainings = self.benchmark.trainings
        return rows + (0.0 if trainings is None else self.unsure * trainings.minutes)

    def to_json(self) -> dict[str, object]:
        """For machines."""
        return {
            "benchmark": self.benchmark.name,
            "kind": self.kind,
            "fresh": list(self.fresh),
            "due": dict(self.due),
            "trainings_stored": self.stored,
            "trainings_due": self.unsure,
            "minutes": round(self.minutes, 1),
        }


def parts(benchmarks: Sequence[Benchmark], kinds: Sequence[Kind]) -> list[Part]:
    """What there is of these kinds, in the order in which it is made."""
    found = []
    for kind in kinds:
        for benchmark in benchmarks:
            stored, verdicts = load_stored(benchmark.folder), benchmark.verdicts()
            names = [row for group in benchmark.groups if group.kind == kind for row in group.rows]
            due = {row: "never measured" for row in names if verdicts[row] == "missing"} | {
                row: f"code changed since {stored[row].when}" for row in names if verdicts[row] == "stale"
            }
            trainings = benchmark.trainings if kind == "trainings" else None
            part = Part(
                benchmark,
                kind,
                [row for row in names if row not in due],
                due,
                0 if trainings is None else len(trainings.stored()),
                0 if trainings is None else len(trainings.due()),
            )
            if names or part.stored:
                found.append(part)
    return found


def _run(part: Part) -> int:
    """In a process group of its own, so that Ctrl-C reaches it once, and all that it has started."""
    command = [sys.executable, str(part.benchmark.folder / "run.py"), f"--{part.kind}", "--json"]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        return child.wait()
    except KeyboardInterrupt:
        os.killpg(child.pid, signal.SIGINT)
        child.wait()
        raise


@dataclass(frozen=True)
class Options(Kinds):
    """Make the rows of all benchmarks fresh, whatever it takes; what was stopped goes on where it was."""

    stored: Flag = False
    """Only show what is due."""
    json: Flag = False
    """Print what is fresh and what is due as JSON."""


def main(
    args: Sequence[str] | None = None,
    benchmarks: Sequence[Benchmark] | None = None,
    run: Callable[[Part], int] = _run,
) -> int:
    """Runs what is due, benchmark by benchmark.

    Args:
      args: the command line; that of the process when not given.
      benchmarks: all when not given.
      run: makes a part fresh and returns an exit code: the benchmark's own command in a process of its own.

    Returns:
      The exit code: 0 if all that was asked for is fresh, 1 if something is still due, 2 if that is because it cannot
      be had on this machine, 130 if somebody stopped it.
    """
    options = tyro.cli(Options, prog="bench --all", args=args)
    benchmarks = every_benchmark() if benchmarks is None else benchmarks
    console, codes = Console(stderr=True, highlight=False, markup=False), {0}
    before = parts(benchmarks, options.chosen)
    if not options.stored:
        console.print(_table(before))
        due = [part for part in before if part.due or part.unsure]
        try:
            for number, part in enumerate(due):
                left = sum(one.minutes for one in due[number:])
                console.print(f"\nabout {left:.0f} minutes left; now {part.benchmark.name}, {part.kind}")
                codes.add(run(part))
        except KeyboardInterrupt:
            codes.add(STOPPED)
    after = parts(benchmarks, options.chosen)
    if options.json:
        print(json.dumps({"parts": [part.to_json() for part in after]}))
    else:
        Console().print(_table(after))
    if STOPPED in codes:
        console.print("stopped; the same command goes on from here")
        return STOPPED
    if NOT_HERE in codes:
        return NOT_HERE
    return int(any(part.due or part.unsure for part in after))


def every_benchmark() -> list[Benchmark]:
    """Those in the folders here, by name."""
    names = sorted(path.parent.name for path in ROOT.glob("benchmarks/*/run.py"))
    return [importlib.import_module(f"benchmarks.{name}.run").BENCHMARK for name in names]


def _table(found: Sequence[Part]) -> Table:
    table = Table(title="benchmarks", title_justify="left")
    for column in ("benchmark", "kind", "fresh", "due", "minutes", "why"):
        table.add_column(column, justify="left" if column in {"benchmark", "kind", "why"} else "right")
    for part in found:
        reasons: dict[str, list[str]] = {}
        for row, reason in part.due.items():
            reasons.setdefault(reason, []).append(row)
        whole = len(part.due) if not part.fresh else -1
        why = [
            f"{'all' if len(rows) == whole else ', '.join(rows)}: {reason}"
            for reason, rows in reasons.items()
        ]
        if part.unsure:
            why.append(f"first steps of {part.unsure} of {part.stored} stored trainings")
        minutes = f"{part.minutes:.0f}" if why else ""
        cells = (str(len(part.fresh)), str(len(part.due)), minutes, "\n".join(why))
        table.add_row(part.benchmark.name, part.kind, *cells)
    return table


if __name__ == "__main__":
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # the first is ignored in what a script has put in the background
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
