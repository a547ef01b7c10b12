"""What farflung costs beside DistributedDataParallel and gloo, on loopback."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Measured, main, torchrun

FULL_ROUNDS = 21
ROWS = {
    "attach, 2 processes, resnet20, batch 32": (2, "attach:resnet20"),
    "attach, 4 processes, resnet20, batch 32": (4, "attach:resnet20"),
    "farflung train, 2 processes, resnet20, batch 32": (2, "train:cifar10/resnet20"),
    "farflung train, 4 processes, resnet20, batch 32": (4, "train:cifar10/resnet20"),
    "attach, 2 processes, MLP 784-256-10, batch 32": (2, "attach:mlp"),
    "attach, 4 processes, MLP 784-256-10, batch 32": (4, "attach:mlp"),
    "attach, 4 processes, resnet20, batch 32, encrypted": (4, "attach:resnet20+encrypted"),
    "all-reduce of 4 kB, 4 processes, loopback": (4, "all_reduce:auto:4096"),
    "all-reduce of 44 MB, 4 processes, loopback": (4, "all_reduce:auto:44000000"),
}


def measure(name: str, quick: bool) -> Mapping[str, Measured]:
    """One row: medians over rounds in which both sides run in turn, with the quartiles as spread."""
    processes, what = ROWS[name]
    rounds = 1 if quick else FULL_ROUNDS
    (result,) = torchrun(processes, "benchmarks.overhead.worker", what, str(rounds))
    config = {"processes": processes, "what": what, "rounds": rounds, "seeds": [0], **result}
    return {name: Measured(result["ratio"], (result["spread"][0], result["spread"][1]), config)}


SOURCES = ["src/farflung/comm/**/*.py", "src/farflung/runtime/wall.py", "src/farflung/replica/**/*.py"]
BENCHMARK = Benchmark(
    Path(__file__).parent,
    [Group((name,), partial(measure, name), "measured", 1.0, SOURCES) for name in ROWS],
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
