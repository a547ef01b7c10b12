"""TicTac and P3: what prioritized transfers without a barrier gain over synchronous SGD in equal buckets."""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Measured, main
from benchmarks.common.runs import step_s as run_step_s
from benchmarks.common.shaped import in_lab
from benchmarks.tictac.cells import (
    BANDWIDTH_BPS,
    REPLICAS,
    Cell,
    RandomOrder,
    exchange_s,
    gain,
    step_s,
)
from benchmarks.tictac.inference import inference_gains
from benchmarks.tictac.models import MODELS
from farflung.network import Link, NetworkProfile

FOLDER = Path(__file__).parent
CHAINS = ("chain of 8", "chain", "chain of 32")
"""Of one layer's size; the rows are of the second."""
COLLECTIVES = ("ring", "direct", "parameter_server")
LATENCIES_S = (0.002, 0.02)
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
NEAR = (1.0, 2.0)
"""T over C at which the best model is looked for."""
BUCKETS_NBYTES = (1, 1 << 17, 1 << 18, 1 << 19, 1 << 20, 1 << 22)
SEEDS = (0, 1, 2)
"""Of random orders."""
LAB_BATCH, LAB_WARM_UP, LAB_STEPS = 16, 5, 20
PRIORITY, IN_ORDER = "priority", "priority(order='forward')"
CANARIES = ("preset tictac", "preset p3", "preset synchronous", "preset ring", "preset parameter_server")

BEST = "training throughput, best model, parameter servers"
INFERENCE = "inference-like forward with pulled parameters, best model"
LAB = "tictac over synchronous, T = F + B, ring, 4 workers, lab"
VIRTUAL = "tictac over synchronous, T = F + B, ring, 4 workers, virtual time"
BUCKETS = "tictac over synchronous with its best bucket size, T = F + B, virtual time"
WORST = "tictac over synchronous, worst of all cells (models, networks, collectives, T from 0.25 to 4 times F + B)"
SERVER = "tictac over synchronous, parameter server, T = F + B, virtual time"
P3 = {
    "ResNet-50": "p3 over synchronous, a convolutional network (ResNet-50 in the paper)",
    "transformer": "p3 over synchronous, a recurrent or attention model (Sockeye in the paper)",
    "VGG-19": "p3 over synchronous, most parameters in the last layers (VGG-19 in the paper)",
}


def first(values: Sequence[Any], quick: bool) -> Sequence[Any]:
    """Only one of them in a quick run."""
    return values[:1] if quick else values


def figure(value: float, config: Mapping[str, Any], spread: Sequence[float] = ()) -> Measured:
    """A row of virtual time."""
    low, high = (min(spread), max(spread)) if spread else (value, value)
    return Measured(value, (low, high), {"replicas": REPLICAS, "seeds": [0], **config}, simulated=True)


def best_of_servers(quick: bool) -> Mapping[str, Measured]:
    """Against random orders without a barrier, and against synchronous SGD; the paper's networks had T near C."""

    def find_gains(model: str, ratio: float, seeds: Sequence[int]) -> list[float]:
        cell = Cell(model, "parameter_server", ratio=ratio)
        ours_s = step_s(cell, PRIORITY)
        over_synchronous[f"{model}, {ratio:g}"] = gain(cell) - 1
        return [step_s(cell, RandomOrder(seed=seed)) / ours_s - 1 for seed in seeds]

    over_synchronous: dict[str, float] = {}
    return {BEST: _find_best(find_gains, quick, {"over_synchronous": over_synchronous})}


def inference(quick: bool) -> Mapping[str, Measured]:
    """Parameters come from a server before each forward pass, in the order of TIC against random orders."""
    return {INFERENCE: _find_best(inference_gains, quick, {})}


def _find_best(
    find_gains: Callable[[str, float, Sequence[int]], list[float]], quick: bool, config: Mapping[str, Any]
) -> Measured:
    """The cell with the largest mean gain over random orders, and its spread over their seeds."""
    found = {
        f"{model}, {ratio:g}": find_gains(model, ratio, first(SEEDS, quick))
        for model, ratio in product(first(list(MODELS), quick), first(NEAR, quick))
    }
    best = max(found.values(), key=statistics.fmean)
    return figure(statistics.fmean(best), {"over_random": found, **config, "seeds": list(SEEDS)}, best)


def equal_times(quick: bool) -> Mapping[str, Measured]:
    """Where an exchange takes as long as computing."""
    chains = {chain: gain(Cell(chain)) for chain in (("chain",) if quick else CHAINS)}
    server = Cell("chain", "parameter_server")
    servers = {model: gain(Cell(model, "parameter_server")) for model in first(list(MODELS), quick)}
    by_size = {size: step_s(Cell("chain"), "synchronous", size) for size in first(BUCKETS_NBYTES, quick)}
    ours_s = step_s(Cell("chain"), PRIORITY)
    return {
        VIRTUAL: figure(chains["chain"], {"chains": chains}, list(chains.values())),
        SERVER: figure(
            gain(server), {"models": servers, "in_order": gain(server, IN_ORDER)}, list(servers.values())
        ),
        BUCKETS: figure(min(by_size.values()) / ours_s, {"synchronous_s": by_size, "ours_s": ours_s}),
    }


def worst(quick: bool) -> Mapping[str, Measured]:
    """Every cell."""
    cells = [Cell(*one) for one in product(MODELS, COLLECTIVES, LATENCIES_S, RATIOS)]
    found = {
        f"{cell.model}, {cell.collective}, {1e3 * cell.latency_s:g} ms, T/C {cell.ratio:g}": gain(cell)
        for cell in first(cells, quick)
    }
    return {WORST: figure(min(found.values()), {"cells": found}, list(found.values()))}


def p3(quick: bool) -> Mapping[str, Measured]:
    """Every replica a server, buckets in the order of their use; the largest gain over T/C from 1 to 2."""
    rows = {}
    for model in first(list(P3), quick):
        found = {
            ratio: gain(Cell(model, "direct", ratio=ratio), IN_ORDER) - 1 for ratio in first(NEAR, quick)
        }
        rows[P3[model]] = figure(max(found.values()), {"T/C": found}, list(found.values()))
    return rows


def lab(quick: bool) -> Mapping[str, Measured]:
    """Real processes on shaped links, at the pace of a device that computes as long as virtual time's exchange."""
    compute_s = exchange_s(Cell("chain"))
    device = f'name = "paced"\nforward_s = {compute_s / 3 / LAB_BATCH}\n'
    nodes, steps = (2, 3) if quick else (REPLICAS, LAB_STEPS)
    network = NetworkProfile.create_uniform(Link(Cell("chain").latency_s, BANDWIDTH_BPS), nodes)
    times_s = {}
    for schedule in ("synchronous", PRIORITY):
        with tempfile.TemporaryDirectory() as scratch:
            pace, run = Path(scratch) / "device.toml", Path(scratch) / "run"
            pace.write_text(device, encoding="utf-8")
            in_lab(
                network, nodes, "farflung", "train",
                "--workload", "benchmarks.tictac.models:chain_workload", "--schedule", schedule,
                "--collective", "ring", "--bucket-nbytes", "1", "--workers", str(nodes),
                "--steps", str(LAB_WARM_UP + steps), "--batch-size", str(LAB_BATCH), "--checkpoint-every", "0",
                "--evaluate-every", "0", "--pace", str(pace), "--quiet", "--out", str(run),
            )  # fmt: skip
            times_s[schedule] = run_step_s(run, LAB_WARM_UP)
    ratio = times_s["synchronous"] / times_s[PRIORITY]
    config = {"seeds": [0], "step_s": times_s, "compute_s": compute_s, "steps": steps}
    return {LAB: Measured(ratio, (ratio, ratio), config)}


BENCHMARK = Benchmark(
    FOLDER,
    [
        Group((VIRTUAL, SERVER, BUCKETS), equal_times, "simulated", 3.0, CANARIES),
        Group((BEST,), best_of_servers, "simulated", 4.0, CANARIES),
        Group((INFERENCE,), inference, "simulated", 1.0, CANARIES),
        Group(tuple(P3.values()), p3, "simulated", 3.0, CANARIES),
        Group((WORST,), worst, "simulated", 25.0, CANARIES),
        Group((LAB,), lab, "measured", 3.0, CANARIES),
    ],
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
