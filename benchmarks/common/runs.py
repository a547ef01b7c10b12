"""Runs of the command line, and what their telemetry says."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.common.workers import ROOT
from farflung.telemetry import read_events

__all__ = ["farflung", "last_event", "step_s"]


def farflung(*args: str) -> str:
    """Runs ``farflung`` with these arguments; what it printed.

    Raises:
      RuntimeError: it failed; with the end of what it said.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MPLBACKEND": "Agg"}
    done = subprocess.run(
        [sys.executable, "-m", "farflung", *args],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )
    if done.returncode != 0:
        raise RuntimeError(f"farflung {' '.join(args)}:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return done.stdout


def step_s(run: Path, warm_up: int) -> float:
    """The mean time of rank 0's steps after the first few, from the end of one to the end of another."""
    ends = [float(event["t"]) for event in _events(run, 0) if event["event"] == "step"]
    return (ends[-1] - ends[warm_up - 1]) / (len(ends) - warm_up)


def last_event(run: Path, rank: int, kind: str) -> dict[str, Any]:
    """The last event of a kind that a rank has told of."""
    return [event for event in _events(run, rank) if event["event"] == kind][-1]


def _events(run: Path, rank: int) -> list[dict[str, Any]]:
    return list(read_events(run / "telemetry" / f"rank-{rank}.jsonl"))
