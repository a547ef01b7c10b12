"""``farflung plan``: is its choice the recipe that reaches the target first?"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Measured, main
from benchmarks.planner.cells import HELD_OUT, NETWORKS, all_cells, summarize
from benchmarks.planner.judged import JUDGED, NODES, PILOTS, TRAININGS
from benchmarks.planner.lab import (
    MEDIAN,
    ORDER,
    PROBE_ERROR,
    PROBED_S,
    WORST,
    compare_probes,
    compare_steps,
)
from farflung.planning import time_recipe
from farflung.planning.choice import MACHINE
from farflung.runs import SimulatedConfig, simulate

MEDIAN_REGRET = "regret, median of all cells"
REGRETS = {
    MEDIAN_REGRET: ("median", 0.5),
    "regret, 90 % of cells": ("p90", 0.9),
    "regret, worst": ("worst", 1.0),
    "cells in which the choice misses a target that another recipe reaches": ("missed", 0.0),
}
"""Figures of :func:`summarize`, and the share of cells whose choices must reach their targets for them."""
OVER_MEDIAN, OVER_WORST = "time over always-fp16, median", "time over always-fp16, worst cell"
COST = "cost of a plan with its default budget, in trainings"
INTERVALS = "80 % intervals hold"
EXACT = "step time without arithmetic against a whole simulated training"
SPEED = "timing one recipe on one network, up to 200,000 parameters, four replicas"
TIMED = {
    "synchronous(codec=truncate16)": "wifi-10mbps",
    "powersgd(rank=2)": "four-regions",
    "local_sgd(sync_every=32)": "wifi-100mbps",
    "diloco(codec=error_feedback(qsgd(bits=4)))": "four-regions",
    "streaming_diloco": "wifi-10mbps",
    "dga": "four-regions",
    "demo(optimizer=sign_sgd, learning_rate=0.001)": "wifi-shared-100mbps",
}
"""On networks without random delays, where two trainings have the same times."""
CANARIES = ("preset synchronous", "preset diloco", "preset demo")


def choices(quick: bool) -> Mapping[str, Measured]:
    """Judge the choices of all cells, beside always fp16, the fastest step, and the fewest bytes."""
    every = all_cells(quick=quick)
    cells = [cell for cell in every if math.isfinite(cell.best_s)]
    figures = summarize(cells)
    seeds = {"nodes": NODES, "seeds": list(JUDGED), "pilot_seeds": list(PILOTS)}
    config: dict[str, Any] = {
        **seeds,
        "networks": list(NETWORKS),
        "cells": {cell.name: cell.to_json() for cell in cells},
        "reached_by_none": [cell.name for cell in every if cell not in cells],
        "rules_of_thumb": {
            rule: _finite(summarize(cells, rule)) for rule in ("fp16", "fastest step", "fewest bytes")
        },
        "held_out": _finite(summarize([cell for cell in cells if HELD_OUT in cell.name] or cells)),
    }
    reached = 1 - figures["missed"]
    rows = {
        row: _measured(figures[figure], reached, share, seeds) for row, (figure, share) in REGRETS.items()
    }
    rows[MEDIAN_REGRET] = replace(rows[MEDIAN_REGRET], config=config)
    over = sorted(
        cell.seconds["plan"] / cell.seconds["fp16"] for cell in cells if math.isfinite(cell.seconds["fp16"])
    )
    reached, over_config = statistics.fmean(map(math.isfinite, over)), {**seeds, "cells": len(over)}
    rows[OVER_MEDIAN] = _measured(statistics.median(over), reached, 0.5, over_config)
    rows[OVER_WORST] = _measured(over[-1], reached, 1.0, over_config)
    costs = sorted(cell.cost for cell in every)
    rows[COST] = Measured(statistics.median(costs), (costs[0], costs[-1]), seeds, simulated=True)
    held = [
        low * MACHINE
        <= second
        <= high / MACHINE  # judged in virtual time, which needs no margin for a machine
        for cell in cells
        for low, high in [cell.planned]
        for second in cell.seeds_s
        if low is not None and high is not None
    ]
    if held:
        rows[INTERVALS] = Measured(
            statistics.fmean(held), None, {**seeds, "times": len(held)}, simulated=True
        )
    return rows


def _finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    return {name: figure if math.isfinite(figure) else None for name, figure in figures.items()}


def _measured(figure: float, reached: float, share: float, config: dict[str, Any]) -> Measured:
    """Return a figure, or the share of cells that reach their targets if it is below the one for a figure."""
    if math.isfinite(figure):
        return Measured(figure, None, config, simulated=True)
    return Measured.missed(reached, share, config, simulated=True)


def exactness(quick: bool) -> Mapping[str, Measured]:
    """Compare times of steps without arithmetic with those of whole trainings, and measure what they cost."""
    errors, costs = {}, {}
    steps = 40 if quick else 310
    for recipe, network in list(TIMED.items())[: 1 if quick else None]:
        settings = {
            "recipe": recipe,
            "steps": steps,
            "workers": NODES,
            "evaluate_every": 0,
            "checkpoint_every": 0,
        }
        workload = "synthetic/quadratic" if quick else "fashion-mnist/mlp"
        config = SimulatedConfig.resolve({"workload": workload, **settings})
        began = time.process_time()
        (pace,), _ = time_recipe(config, [network])
        costs[recipe] = time.process_time() - began
        events = simulate(workload, network=network, **settings).events[0]  # type: ignore[arg-type]
        last = max(float(str(event["t"])) for event in events if event["event"] == "step")
        errors[recipe] = abs(pace.compute_seconds(steps) / last - 1)
    config_json = {"steps": steps, "errors": errors, "processor_s": costs, "networks": dict(TIMED)}
    worst, cost = max(errors.values()), statistics.median(costs.values())
    return {
        EXACT: Measured(worst, (min(errors.values()), worst), config_json, simulated=True),
        SPEED: Measured(cost, (min(costs.values()), max(costs.values())), config_json),
    }


BENCHMARK = Benchmark(
    Path(__file__).parent,
    [
        Group((EXACT, SPEED), exactness, "simulated", 2.0, CANARIES),
        Group((*REGRETS, OVER_MEDIAN, OVER_WORST, COST, INTERVALS), choices, "trainings", 60.0, CANARIES),
        Group((MEDIAN, WORST, ORDER), compare_steps, "measured", 15.0, CANARIES),
        Group((PROBE_ERROR, PROBED_S), compare_probes, "measured", 4.0, CANARIES[:1]),
    ],
    TRAININGS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
