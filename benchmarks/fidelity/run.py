"""The simulator against the lab: the same recipe on the same network, in virtual time and on shaped links."""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.common import Kept, Measured, main, source_hash  # noqa: E402
from benchmarks.common.runs import farflung, last_event, step_s  # noqa: E402

FOLDER = Path(__file__).parent
NODES, WORKLOAD, BATCH_SIZE = 4, "fashion-mnist/cnn", 16
FORWARD_S = 0.008
"""Seconds per sample: a step computes for 0.384 s, so that this machine's own time fits in, four nodes at once."""
NETWORKS = ("wifi-10mbps", "wifi-100mbps", "four-regions", "lan-1g")
RECIPES: dict[str, tuple[str, ...]] = {
    "direct": ("--recipe", "synchronous"),
    "ring": ("--recipe", "ring"),
    "ring, truncate16": ("--recipe", "ring", "--codec", "truncate16"),
    "direct, topk": ("--recipe", "synchronous", "--codec", "topk(density=0.1)"),
}
WARM_UP_STEPS, STEPS, QUICK_STEPS = 5, 30, 12
OVERRAN_AT_MOST = 0.01
CELLS_AT_LEAST = 12
REFUSED = "does not come out right on this machine"
"""What a lab says whose links are off; such a network is left out."""
HEADER_NBYTES = 52
"""Of IP and TCP with timestamps, in each packet that an interface counts."""
MEDIAN, WORST, BYTES = (
    "median error over at least 12 cells",
    "worst error",
    "bytes against interface counters",
)
SOURCES = [
    "src/farflung/lab/*.py",
    "src/farflung/comm/**/*.py",
    "src/farflung/network/*.py",
    "src/farflung/runtime/*.py",
    "src/farflung/replica/*.py",
]


def measure(quick: bool) -> Mapping[str, Measured]:
    """All cells, then the three rows; cells measured before with the same sources are kept."""
    recipes = list(RECIPES)[:1] if quick else list(RECIPES)
    networks = NETWORKS[1:2] if quick else NETWORKS
    cells, refused = [], []
    for network in networks:
        try:
            cells += [cell(network, recipe, quick) for recipe in recipes]
        except RuntimeError as error:
            if REFUSED not in str(error):
                raise
            refused.append(network)
    counted = [one for one in cells if one["overran"] < OVERRAN_AT_MOST]
    if len(counted) < (1 if quick else CELLS_AT_LEAST):
        raise SystemExit(
            f"only {len(counted)} of {len(cells)} cells count, in the others steps overran the pace, and the lab "
            f"refused {', '.join(refused) or 'no network'}: this machine is too slow or too busy"
        )
    errors = [one["error"] for one in counted]
    differences = [one["bytes_error"] for one in counted]
    config = {
        "cells": cells,
        "counted": len(counted),
        "networks_refused": refused,
        "nodes": NODES,
        "workload": WORKLOAD,
        "seeds": [0],
    }
    quartiles = statistics.quantiles(errors, n=4) if len(errors) > 1 else errors * 3
    return {
        MEDIAN: Measured(statistics.median(errors), (quartiles[0], quartiles[2]), config),
        WORST: Measured(max(errors), (min(errors), max(errors)), {"counted": len(counted)}),
        BYTES: Measured(
            max(differences), (min(differences), max(differences)), {"header_nbytes": HEADER_NBYTES}
        ),
    }


def cell(network: str, recipe: str, quick: bool) -> dict[str, Any]:
    """One recipe on one network, in both worlds."""

    def measure() -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as scratch:
            made = _cell(network, recipe, QUICK_STEPS if quick else STEPS, Path(scratch))
        print(f"{network}, {recipe}: {made}", file=sys.stderr, flush=True)
        return made

    sources = source_hash([*SOURCES, "benchmarks/fidelity/*.py"])
    key = {"network": network, "recipe": recipe, "sources": sources}
    return Kept(FOLDER / "results" / "cells.jsonl", quick=quick).once(key, measure)


def _cell(network: str, recipe: str, steps: int, scratch: Path) -> dict[str, Any]:
    device = scratch / "device.toml"
    device.write_text(f'name = "paced"\nforward_s = {FORWARD_S}\n', encoding="utf-8")
    run = [
        "--workload", WORKLOAD, "--data", "packaged", *RECIPES[recipe], "--workers", str(NODES), "--steps", str(steps),
        "--batch-size", str(BATCH_SIZE), "--checkpoint-every", "0", "--evaluate-every", "0", "--pace", str(device),
        "--json", "--quiet",
    ]  # fmt: skip
    report = scratch / "report.json"
    lab, simulated = scratch / "lab", scratch / "simulated"
    farflung("simulate", "--network", network, *run, "--out", str(simulated))
    farflung(
        "lab", "--network", network, "--nodes", str(NODES), "--report", str(report), "--logs", str(scratch / "logs"),
        "train", *run, "--out", str(lab),
    )  # fmt: skip
    real_s, virtual_s = step_s(lab, WARM_UP_STEPS), step_s(simulated, WARM_UP_STEPS)
    counters = json.loads(report.read_text(encoding="utf-8"))["counters"]
    counted = sum(c["sent_nbytes"] - HEADER_NBYTES * c["sent_packets"] for c in counters)
    ends = [last_event(lab, rank, "end") for rank in range(NODES)]
    paces = [last_event(lab, rank, "pace") for rank in range(NODES)]
    said = sum(end["bytes_sent"] if "bytes_sent" in end else end["bytes_sent_per_replica"] for end in ends)
    return {
        "steps": steps,
        "lab_s": real_s,
        "simulated_s": virtual_s,
        "error": abs(virtual_s / real_s - 1.0),
        "bytes": said,
        "counted_bytes": counted,
        "bytes_error": abs(counted / said - 1.0),
        "overran": sum(pace["overran"] for pace in paces) / sum(pace["steps"] for pace in paces),
    }


if __name__ == "__main__":
    sys.exit(
        main(
            FOLDER,
            {(MEDIAN, WORST, BYTES): measure},
            sources=SOURCES,
            minutes={(MEDIAN, WORST, BYTES): 14.0},
        )
    )
