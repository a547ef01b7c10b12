"""Planned step times and probed links beside those of the lab: real processes on shaped links of this machine."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.common import Kept, Measured
from benchmarks.common.runs import farflung
from benchmarks.common.shaped import paced_step_s
from benchmarks.fidelity.order import Timed, agreement, tau, without_one
from benchmarks.planner.judged import NODES, TASKS
from farflung.devices import find_device
from farflung.lab.tun import read_congestion_control
from farflung.network import find_network
from farflung.planning import time_recipe
from farflung.runs import SimulatedConfig

__all__ = ["MEDIAN", "ORDER", "PROBED_S", "PROBE_ERROR", "WORST", "compare_probes", "compare_steps"]

MEDIAN, WORST = "planned step time against the lab, median", "planned step time against the lab, worst"
ORDER = "order of step times against the lab"
PROBE_ERROR, PROBED_S = "probe: latency and bandwidth per link", "probe, 8 nodes"
NETWORKS = ("wifi-10mbps", "wifi-100mbps", "four-regions")
RECIPES = (
    "synchronous(codec=truncate16)",
    "synchronous",
    "synchronous(codec=int8)",
    "synchronous(codec=error_feedback(topk(density=0.01)))",
    "powersgd(rank=2)",
    "pipe_sgd",
    "local_sgd",
    "diloco(codec=error_feedback(qsgd(bits=4)))",
    "streaming_diloco",
    "demo(optimizer=sign_sgd, learning_rate=0.001)",
)
"""Ten of the candidates: one of each kind."""
BATCH, FORWARD_S = 32, 0.001
"""Samples of a step, and the pace of a forward pass for each: a step computes for 0.096 s."""
RUN_S, WARM_UP, LEAST = 10.0, 3, 6
"""Seconds of the steps that count, as planned; least numbers of steps before them and of these."""
PROBED = (("wifi-10mbps", 4), ("wifi-100mbps", 4), ("4g", 4), ("four-regions", 4), ("wifi-10mbps", 8))
FOLDER = Path(__file__).parent


def compare_steps(quick: bool) -> Mapping[str, Measured]:
    """Compare planned times of a step with those of ten recipes in the lab on three networks."""
    kept = Kept(FOLDER, "lab", quick=quick)
    cells = [
        kept.once({"network": network, "recipe": recipe}, partial(_time_in_lab, network, recipe))
        for network in NETWORKS[: 1 if quick else None]
        for recipe in RECIPES[: 2 if quick else None]
    ]
    errors = sorted(abs(cell["planned_s"] / cell["lab_s"] - 1) for cell in cells)
    timed: dict[str, list[Timed]] = {}
    for cell in cells:
        timed.setdefault(cell["network"], []).append(Timed(cell["lab_s"], 0.0, cell["planned_s"]))
    orders = [agreement(recipes) for recipes in timed.values()]
    spread, config = (errors[0], errors[-1]), {"nodes": NODES, "cells": cells}
    return {
        MEDIAN: Measured(statistics.median(errors), spread, config),
        WORST: Measured(errors[-1], spread, {"nodes": NODES}),
        ORDER: Measured(tau(orders), without_one(orders), {"pairs": sum(pairs for _, pairs in orders)}),
    }


def _time_in_lab(network: str, recipe: str) -> dict[str, Any]:
    """Returns the time of a step as planned and in the lab, of the same steps, at the pace of a slow device."""
    workload, text = TASKS["mlp"].workload, f"{network}(congestion={read_congestion_control()})"
    device = replace(
        find_device("cpu-core", forward_flops=1.0), forward_s=FORWARD_S, backward_s=None, optimizer_s=0.0
    )
    settings: dict[str, Any] = {
        "workload": workload,
        "data": "packaged",
        "recipe": recipe,
        "workers": NODES,
        "batch_size": BATCH,
        "device": device,
    }
    config = SimulatedConfig.resolve({**settings, "steps": TASKS["mlp"].steps})
    period = config.recipe.build_components(0).schedule.cycle_steps
    step_s = time_recipe(config, [text])[0][0].step_s
    warm_up = period * math.ceil(WARM_UP / period)
    steps = period * math.ceil(max(LEAST, RUN_S / step_s) / period)
    (pace,), _ = time_recipe(SimulatedConfig.resolve({**settings, "steps": warm_up + steps}), [text])
    load = os.getloadavg()[0]
    lab_s = paced_step_s(
        find_network(text), NODES, workload, "--recipe", recipe,
        batch=BATCH, forward_s=FORWARD_S, warm_up=warm_up, steps=steps,
    )  # fmt: skip
    planned_s = (pace.compute_seconds(warm_up + steps) - pace.compute_seconds(warm_up)) / steps
    print(f"{network}, {recipe}: planned {planned_s:.4g} s, lab {lab_s:.4g} s", file=sys.stderr, flush=True)
    return {"steps": steps, "planned_s": planned_s, "lab_s": lab_s, "load": load}


def compare_probes(quick: bool) -> Mapping[str, Measured]:
    """Compare probed latencies and bandwidths with the profiles of the lab's links."""
    kept = Kept(FOLDER, "probes", quick=quick)
    probes = [
        kept.once({"network": network, "nodes": nodes}, partial(_probe_in_lab, network, nodes))
        for network, nodes in PROBED[: 1 if quick else None]
    ]
    worst = [max(probe["latency_errors"] + probe["bandwidth_errors"]) for probe in probes]
    seconds = probes[-1]["seconds"]
    return {
        PROBE_ERROR: Measured(max(worst), (min(worst), max(worst)), {"probes": probes}),
        PROBED_S: Measured(seconds, (seconds, seconds), {"network": probes[-1]["network"]}),
    }


def _probe_in_lab(network: str, nodes: int) -> dict[str, Any]:
    """Returns how far each link is off, and the seconds from the start of the processes to their end."""
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        report, logs = Path(folder) / "report.json", Path(folder) / "logs"
        farflung(
            "lab", "--network", network, "--nodes", str(nodes), "--report", str(report), "--logs", str(logs),
            "--", sys.executable, "-m", "farflung", "probe", "--json",
        )  # fmt: skip
        lab = json.loads(report.read_text(encoding="utf-8"))
        lines = (logs / "rank-0.log").read_text(encoding="utf-8").splitlines()
    links = next(json.loads(line) for line in lines if line.startswith("{"))["links"]
    one_way = {(pair["src"], pair["dst"]): pair["expected_latency_s"] for pair in lab["pairs"]}
    latencies, bandwidths = [], []
    for link, pair in zip(links, lab["pairs"], strict=True):
        half_s = (one_way[pair["src"], pair["dst"]] + one_way[pair["dst"], pair["src"]]) / 2
        latencies.append(abs(link["latency_s"] / half_s - 1))
        bandwidths.append(abs(link["bandwidth_bps"] / pair["expected_bandwidth_bps"] - 1))
    print(
        f"{network}, {nodes} nodes: {max(latencies):.3g}, {max(bandwidths):.3g}", file=sys.stderr, flush=True
    )
    return {
        "latency_errors": latencies,
        "bandwidth_errors": bandwidths,
        "seconds": lab["seconds"],
        "load": load,
    }
