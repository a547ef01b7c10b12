"""The simulator against the lab: the same recipe on the same network, in virtual time and on shaped links."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import Benchmark, Group, Kept, Measured, main  # noqa: E402
from benchmarks.common.results import load_results  # noqa: E402
from benchmarks.fidelity.cells import PACED, Cell, calibrated, compared, measured, use  # noqa: E402
from benchmarks.fidelity.networks import HARD, NAMED, drawn  # noqa: E402
from benchmarks.fidelity.order import Timed, agreement, tau, without_one  # noqa: E402
from benchmarks.fidelity.recipes import CODED, DENSE, PERIODS, RECIPES, UNPACED, dealt  # noqa: E402

FOLDER = Path(__file__).parent
NODES, UNPACED_NODES = 4, 2
"""Unpaced replicas need a processor each, and this machine has two."""
UNPACED_NETWORKS = ("wifi-100mbps", "lan-1g")
ROUNDS, QUICK_ROUNDS = 30, 5
OVERRAN_AT_MOST = 0.01
CELLS_AT_LEAST = 12
REFUSED = "does not come out right on this machine"
"""What a lab says whose links are off; such a network is left out."""
MEDIAN, WORST, BYTES, UNPACED_ERROR, ORDER = (
    "median error over at least 12 cells",
    "worst error",
    "bytes against interface counters",
    "median error of recipes with codecs, unpaced devices as calibrated, wifi-100mbps and lan-1g",
    "order of recipes by step time kept, all networks",
)
HARD_MEDIAN, HARD_WORST = (
    "median error on six hard networks, ten recipes",
    "worst error on six hard networks, ten recipes",
)
USE = "utilisation, simulated against lab, 4 periods x 4 bandwidths"
BANDWIDTHS = ("wifi-10mbps", "wifi-50mbps", "wifi-100mbps", "lan-1g")
CANARIES = (
    "preset synchronous",
    "preset ring",
    "preset pipe_sgd",
    "preset delayed",
    "topk, residuals",
    "int8 on hops",
)
Row = Mapping[str, Any]


def measure(quick: bool) -> Mapping[str, Measured]:
    """All cells, then the rows; cells that this commit has measured with the same seed are kept."""
    kept = Kept(FOLDER, "cells", quick=quick)
    seed = seed_of(kept)
    found, refused = run([*paced(seed, quick), *unpaced(seed, quick)], kept, quick)
    counted = [cell for cell in found if cell["overran"] < OVERRAN_AT_MOST]
    timed = [error for cell in counted if cell["paced"] for error in (cell["error"], cell["short_error"])]
    if len(timed) < (1 if quick else CELLS_AT_LEAST):
        raise SystemExit(
            f"only {len(timed)} of {2 * len(found)} comparisons count, in the others steps overran the pace, and the "
            f"lab refused {', '.join(refused) or 'no network'}: this machine is too slow or too busy"
        )
    config = {
        "seed": seed,
        "cells": [{key: cell[key] for key in _SAID} for cell in counted],
        "profiles": {cell["network"]: cell["profile"] for cell in counted if cell["profile"]},
        "overran": [f"{cell['network']}: {cell['recipe']}" for cell in found if cell not in counted],
        "networks_refused": refused,
        "nodes": NODES,
    }
    orders = list(orders_of(counted).values())
    coded = [cell["error"] for cell in counted if not cell["paced"] and cell["recipe"] in CODED]
    worst = max(timed)
    differences = [cell["bytes_error"] for cell in counted]
    whole = tau(orders)
    return {
        MEDIAN: Measured(statistics.median(timed), median_within(timed), config),
        WORST: Measured(worst, (worst, worst), {"seed": seed, "comparisons": len(timed)}),
        BYTES: Measured(max(differences), (min(differences), max(differences)), {"seed": seed}),
        **(
            {
                UNPACED_ERROR: Measured(
                    statistics.median(coded), median_within(coded), {"seed": seed, "nodes": UNPACED_NODES}
                )
            }
            if coded
            else {}
        ),
        **(
            {}
            if whole is None
            else {
                ORDER: Measured(
                    whole, without_one(orders), {"seed": seed, "pairs": sum(pairs for _, pairs in orders)}
                )
            }
        ),
    }


def measure_hard(quick: bool) -> Mapping[str, Measured]:
    """All recipes and local SGD on networks of one difficulty each; cells of this commit and seed are kept."""
    kept = Kept(FOLDER, "hard", quick=quick)
    seed = seed_of(kept)
    cells = [
        Cell(network, profile, recipe, NODES, paced=True, seed=seed)
        for network, profile in HARD.items()
        for recipe in (*RECIPES, "every 8")
    ]
    found, refused = run(cells[: 1 if quick else None], kept, quick)
    counted = [cell for cell in found if cell["overran"] < OVERRAN_AT_MOST]
    timed = [error for cell in counted for error in (cell["error"], cell["short_error"])]
    config = {
        "seed": seed,
        "cells": [{key: cell[key] for key in (*_SAID, "short_lab_s", "ends_s")} for cell in counted],
        "overran": [f"{cell['network']}: {cell['recipe']}" for cell in found if cell not in counted],
        "networks_refused": refused,
        "nodes": NODES,
    }
    return {
        HARD_MEDIAN: Measured(statistics.median(timed), median_within(timed), config),
        HARD_WORST: Measured(max(timed), None, {"seed": seed, "comparisons": len(timed)}),
    }


def used(quick: bool) -> Mapping[str, Measured]:
    """Compare the use of processors for some periods of local steps."""
    kept = Kept(FOLDER, "use", quick=quick)
    seed = seed_of(kept)
    cells = [
        (
            Cell(network, "", f"every {period}", UNPACED_NODES if quick else NODES, paced=True, seed=seed),
            period,
        )
        for network in BANDWIDTHS[: 1 if quick else None]
        for period in PERIODS[: 1 if quick else None]
    ]
    found = []
    for cell, period in cells:
        device = PACED if quick else this_machine([cell], cell, kept, quick)
        told = kept.once(asdict(cell), partial(use, cell, device, period, quick=quick))
        print(f"{cell.network}, {cell.recipe}: {told}", file=sys.stderr, flush=True)
        found.append({**told, "network": cell.network, "period": period})
    errors = [one["error"] for one in found]
    config = {"seed": seed, "nodes": NODES, "cells": found, "median": statistics.median(errors)}
    return {USE: Measured(max(errors), (min(errors), max(errors)), config)}


_SAID = ("network", "recipe", "paced", "steps", "lab_s", "simulated_s", "error", "short_error", "bytes_error")


def seed_of(kept: Kept) -> int:
    """One more than that of the stored rows, so that each run of the lab has networks that none before it had."""
    stored = load_results(FOLDER).get(MEDIAN)
    newest = 0 if stored is None else int(stored.config.get("seed", 0))
    return newest if kept.find({"seed": newest}) else newest + 1


def paced(seed: int, quick: bool) -> list[Cell]:
    """All networks with the recipes that the seed deals them, on devices that compute slowly."""
    if quick:
        return [Cell("wifi-100mbps", "", DENSE, UNPACED_NODES, paced=True, seed=seed)]
    profiles = {**dict.fromkeys(NAMED, ""), **drawn(seed, NODES)}
    return [
        Cell(network, profiles[network], recipe, NODES, paced=True, seed=seed)
        for network, recipes in dealt(list(profiles), seed).items()
        for recipe in recipes
    ]


def unpaced(seed: int, quick: bool) -> list[Cell]:
    """Recipes with codecs, and the dense one, on devices that compute as fast as this machine."""
    return [
        Cell(network, "", recipe, UNPACED_NODES, paced=False, seed=seed)
        for network in UNPACED_NETWORKS[: 1 if quick else None]
        for recipe in (CODED[:1] if quick else UNPACED)
    ]


def run(cells: Sequence[Cell], kept: Kept, quick: bool) -> tuple[list[Row], list[str]]:
    """What came out for each cell, and the networks that the lab refused."""
    found: list[Row] = []
    refused: list[str] = []
    for cell in cells:
        if cell.network in refused:
            continue

        device = this_machine(cells, cell, kept, quick)
        measure = partial(measured, cell, device, quick=quick)
        try:
            lab = kept.once(asdict(cell), measure)
        except RuntimeError as error:
            if REFUSED not in str(error):
                raise
            refused.append(cell.network)
            print(f"{cell.network}: the lab refuses it", file=sys.stderr, flush=True)
        else:
            found.append({**lab, **compared(cell, lab, device)})
            said = {
                name: found[-1][name] for name in ("lab_s", "simulated_s", "error", "short_error", "overran")
            }
            print(f"{cell.network}, {cell.recipe}: {said}", file=sys.stderr, flush=True)
    return found, refused


def this_machine(cells: Sequence[Cell], of: Cell, kept: Kept, quick: bool) -> str:
    """It as a device, as TOML: shared by as many replicas as a cell has, calibrated once for all cells of its kind."""
    of = cells[0] if quick else of  # once for all cells
    alike = [cell for cell in cells if quick or (cell.nodes, cell.paced) == (of.nodes, of.paced)]
    key = {"calibrated": of.nodes, "paced": of.paced, "seed": of.seed}
    rounds = QUICK_ROUNDS if quick else ROUNDS
    line = kept.once(key, lambda: {"device": calibrated(of, {cell.recipe for cell in alike}, rounds=rounds)})
    return str(line["device"])


def orders_of(cells: Sequence[Row]) -> dict[tuple[str, bool], tuple[int, int]]:
    """Of each network and kind of device, how the orders agree; see :func:`benchmarks.fidelity.order.agreement`."""
    groups: dict[tuple[str, bool], list[Timed]] = {}
    for cell in cells:
        timed = Timed(cell["lab_s"], cell["standard_error_s"], cell["simulated_s"])
        groups.setdefault((cell["network"], cell["paced"]), []).append(timed)
    return {group: agreement(recipes) for group, recipes in groups.items()}


def median_within(errors: Sequence[float]) -> tuple[float, float]:
    """Between which of the errors the median of as many others would lie, 19 times of 20, by their order alone."""
    ordered, half = sorted(errors), 0.98 * math.sqrt(len(errors))
    last = len(ordered) - 1
    low, high = math.floor(len(ordered) / 2 - half), math.ceil(len(ordered) / 2 + half)
    return ordered[max(0, low)], ordered[min(last, high)]


BENCHMARK = Benchmark(
    FOLDER,
    [
        Group((MEDIAN, WORST, BYTES, UNPACED_ERROR, ORDER), measure, "measured", 55.0, CANARIES),
        Group((HARD_MEDIAN, HARD_WORST), measure_hard, "measured", 50.0, (*CANARIES, "preset local_sgd")),
        Group((USE,), used, "measured", 8.0, ("preset local_sgd",)),
    ],
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
