"""Measures and simulates the rows of all benchmarks anew: ``scripts/bench --release [kinds]``."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import tyro
from rich.console import Console

from benchmarks.common import Benchmark
from benchmarks.common.command import NOT_HERE, STOPPED, Kind, Kinds
from benchmarks.common.provenance import ROOT, NotCommitted, commit_here
from benchmarks.common.results import load_results

__all__ = ["every_benchmark", "main"]


@dataclass(frozen=True)
class Options(Kinds):
    """Measure and simulate all rows at this commit, and train again where a canary has changed; resumable."""


def _run(benchmark: Benchmark, kind: Kind) -> int:
    """In a process group of its own, so that Ctrl-C reaches it once, and all that it has started."""
    command = [sys.executable, str(benchmark.folder / "run.py"), f"--{kind}", "--json"]
    child = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True)
    try:
        return child.wait()
    except KeyboardInterrupt:
        os.killpg(child.pid, signal.SIGINT)
        child.wait()
        raise


def main(
    args: Sequence[str] | None = None,
    benchmarks: Sequence[Benchmark] | None = None,
    run: Callable[[Benchmark, Kind], int] = _run,
) -> int:
    """Runs all benchmarks, kind by kind, so that no time is measured beside a training.

    Args:
      args: the command line; that of the process when not given.
      benchmarks: all when not given.
      run: measures what is due of a benchmark and a kind, and returns an exit code.

    Returns:
      The exit code: the worst of the benchmarks', 130 after Ctrl-C.
    """
    options = tyro.cli(Options, prog="bench --release", args=args)
    console, codes = Console(stderr=True, highlight=False, markup=False, soft_wrap=True), {0}
    try:
        commit = commit_here()
    except NotCommitted as error:
        console.print(f"bench: {error}")
        return NOT_HERE
    due = [
        (benchmark, kind, sum(group.minutes for group in groups))
        for kind in options.chosen
        for benchmark in (every_benchmark() if benchmarks is None else benchmarks)
        if (groups := benchmark.due([kind], commit, load_results(benchmark.folder)))
    ]
    try:
        for number, (benchmark, kind, _) in enumerate(due):
            left = sum(minutes for _, _, minutes in due[number:])
            console.print(f"about {left:.0f} minutes left, without trainings; now {benchmark.name}, {kind}")
            codes.add(run(benchmark, kind))
    except KeyboardInterrupt:
        console.print("stopped; the same command goes on from here")
        return STOPPED
    return max(codes)


def every_benchmark() -> list[Benchmark]:
    """Those in the folders here, by name."""
    names = sorted(path.parent.name for path in ROOT.glob("benchmarks/*/run.py"))
    return [importlib.import_module(f"benchmarks.{name}.run").BENCHMARK for name in names]


if __name__ == "__main__":
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # a script ignores the first for what it puts in the background
        signal.signal(number, signal.default_int_handler)
    sys.exit(main())
