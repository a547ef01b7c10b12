"""``farflung plan``: is its choice the recipe that reaches the target first?"""

from __future__ import annotations

import math
import statistics
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Measured, main
from benchmarks.planner.cells import HELD_OUT, NETWORKS, Cell, all_cells, summarize
from benchmarks.planner.judged import JUDGED, NODES, PILOTS, TRAININGS
from farflung.planning import time_recipe
from farflung.runs import SimulatedConfig, simulate

REGRETS = {
    "regret, median of all cells": "median",
    "regret, 90 % of cells": "p90",
    "regret, worst": "worst",
    "cells in which the choice misses a target that another recipe reaches": "missed",
}
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
    cells = [cell for cell in all_cells(quick=quick) if math.isfinite(cell.best_s)]
    found = summarize(cells)
    config: dict[str, Any] = {
        "nodes": NODES,
        "seeds": list(JUDGED),
        "pilot_seeds": list(PILOTS),
        "networks": list(NETWORKS),
        "cells": {cell.name: vars(cell) for cell in cells},
        "rules_of_thumb": {
            rule: _finite(summarize(cells, rule)) for rule in ("fp16", "fastest step", "fewest bytes")
        },
        "held_out": _finite(summarize([cell for cell in cells if HELD_OUT in cell.name] or cells)),
    }
    rows = {name: _measured(found[figure], config) for name, figure in REGRETS.items()}
    over = sorted(cell.seconds["plan"] / cell.seconds["fp16"] for cell in cells)
    rows[OVER_MEDIAN], rows[OVER_WORST] = (
        _measured(statistics.median(over), config),
        _measured(over[-1], config),
    )
    rows[COST] = _measured(statistics.median(cell.cost for cell in cells), config)
    bounded = [cell for cell in cells if cell.planned[0] is not None]
    if bounded:
        rows[INTERVALS] = _measured(
            statistics.fmean(map(_holds, bounded)), {**config, "bounded": len(bounded)}
        )
    return rows


def _holds(cell: Cell) -> bool:
    low, high = cell.planned
    return low is not None and high is not None and low <= cell.seconds["plan"] <= high


def _finite(figures: Mapping[str, float]) -> dict[str, float | None]:
    return {name: figure if math.isfinite(figure) else None for name, figure in figures.items()}


def _measured(figure: float, config: dict[str, Any]) -> Measured:
    if not math.isfinite(figure):
        return Measured.missed(1e9, 1.0, config, simulated=True)
    return Measured(figure, (figure, figure), config, simulated=True)


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
        Group((*REGRETS, OVER_MEDIAN, OVER_WORST, COST, INTERVALS), choices, "trainings", 240.0, CANARIES),
    ],
    TRAININGS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
