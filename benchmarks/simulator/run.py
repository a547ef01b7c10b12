"""How large simulations with real arithmetic may be."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Measured, main
from benchmarks.common.workers import ROOT, environment
from benchmarks.simulator import worker

ROUNDS = 3
COUNTS = (1, 4, 16, 64, 256, 1024)
"""Numbers of replicas whose cost is stored."""
MLP_SECONDS = "1,024 replicas and a parameter server, MLP 64-256-10, 20 steps"
MLP_MEMORY = "same, memory"
RESNET = "128 replicas and a parameter server, resnet8 on CIFAR-10, 10 steps"


def mlp(quick: bool) -> Mapping[str, Measured]:
    """Seconds and memory of the largest simulation, and what a replica's step costs among few and among many."""
    count = 16 if quick else 1024
    runs = _rounds("mlp", count, 20, quick)
    costs = {} if quick else {str(n): _cost_ms(n) for n in COUNTS}
    config = {**_config(runs), "ms_per_replica_step_by_replicas": costs}
    return {
        MLP_SECONDS: Measured(*_middle([one["processor_s"] for one in runs]), config),
        MLP_MEMORY: Measured(*_middle([one["gib"] for one in runs]), config),
    }


def resnet(quick: bool) -> Mapping[str, Measured]:
    """Seconds of a simulation whose arithmetic is convolutions."""
    runs = [_worker("resnet8", 4 if quick else 128, 2 if quick else 10, quick)]
    return {RESNET: Measured(*_middle([one["seconds"] for one in runs]), _config(runs))}


def _cost_ms(replicas: int) -> float:
    """Of a replica's step: the difference of a longer and a shorter run, so without their beginnings."""
    steps = max(5, 1000 // replicas)
    longer, shorter = (float(_worker("mlp", replicas, n)["processor_s"]) for n in (3 * steps, steps))
    return round(1e3 * (longer - shorter) / (2 * steps * replicas), 3)


def _rounds(what: str, count: int, steps: int, quick: bool) -> list[dict[str, Any]]:
    return [_worker(what, count, steps, quick) for _ in range(1 if quick else ROUNDS)]


def _worker(what: str, count: int, steps: int, quick: bool = False) -> dict[str, Any]:
    """One simulation in a process of its own; a quick one, of which nothing is stored, in this one."""
    if quick:
        return {**worker.measured(what, count, steps), "replicas": count, "steps": steps}
    command = [sys.executable, "-m", "benchmarks.simulator.worker", what, str(count), str(steps)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), cwd=ROOT, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return {**json.loads(done.stdout.splitlines()[-1]), "replicas": count, "steps": steps}


def _middle(values: list[float]) -> tuple[float, tuple[float, float]]:
    return statistics.median(values), (min(values), max(values))


def _config(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"seeds": [0], "cores": os.cpu_count(), "runs": runs}


CANARIES = ("preset synchronous", "preset ring", "preset parameter_server")
BENCHMARK = Benchmark(
    Path(__file__).parent,
    [
        Group((MLP_SECONDS, MLP_MEMORY), mlp, "measured", 6.0, CANARIES),
        Group((RESNET,), resnet, "measured", 1.0, CANARIES),
    ],
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
