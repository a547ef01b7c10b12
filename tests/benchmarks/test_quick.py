"""Each benchmark's ``--quick`` runs each of its measurements once, in some seconds, and prints rows as JSON."""

from __future__ import annotations

import json
import runpy
import sys
from functools import partial

import pytest

from benchmarks.release import every_benchmark
from tests.forks import Fork

PARTS = {
    "coded": pytest.mark.lab,
    "compression_pays": pytest.mark.lab,
    "delayed": pytest.mark.lab,
    "fidelity": pytest.mark.lab,
    "kafka": pytest.mark.kafka,
    "pipe_sgd": pytest.mark.lab,
}
"""Benchmarks some of whose rows need a part that a machine may lack."""
FAST = {"codecs", "simulator"}
NAMES = [
    pytest.param(
        one.name,
        marks=[
            *([PARTS[one.name]] if one.name in PARTS else []),
            *([] if one.name in FAST else [pytest.mark.thorough]),
        ],
    )
    for one in every_benchmark()
]


def quick(name: str) -> None:
    """Runs the benchmark as its script does, and exits."""
    sys.argv = ["run.py", "--quick", "--json"]
    runpy.run_module(f"benchmarks.{name}.run", run_name="__main__")


@pytest.mark.parametrize("name", NAMES)
def test_quick(name: str) -> None:
    with Fork(partial(quick, name)) as process:
        said, warned = process.finished()
    assert process.returncode == 0, "\n".join(warned)
    rows = json.loads(said)["rows"]
    measured = [row for row in rows if row["verdict"] != "not run"]
    assert measured
    assert {row["verdict"] for row in measured} == {"quick"}
    assert all(row["commit"] == "" for row in measured)
