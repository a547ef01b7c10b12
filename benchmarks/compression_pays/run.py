"""When compression pays: step times of every codec beside DDP's, on three networks, in virtual time."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.common import Measured, main
from benchmarks.compression_pays.methods import DDP, FP16_HOOK, METHODS, MODELLED, POWERSGD_HOOK
from benchmarks.compression_pays.virtual import BATCH, NODES, SEED, costs_of, measured_model, step_s
from farflung.network import network_profile

NETWORKS = {"10 Mbit/s": "wifi-10mbps", "100 Mbit/s": "wifi-100mbps", "1 Gbit/s": "lan-1g"}
ROWS = {
    "best codec at 10 Mbit/s": "10 Mbit/s",
    "best codec at 100 Mbit/s": "100 Mbit/s",
}
"""Those that can be simulated; the other two ask for accuracy and for a choice made while training, in the lab."""
ROUNDS, STEPS = 9, 3


def measure(quick: bool) -> Mapping[str, Measured]:
    """Both rows, and the table of all methods on all networks."""
    torch.set_num_threads(1)
    model = measured_model("cifar10/resnet20", 1 if quick else ROUNDS)
    steps = 1 if quick else STEPS
    seconds: dict[str, dict[str, float]] = {}
    sent: dict[str, int] = {}
    processor_ms: dict[str, float] = {}
    for name, reducer in {**MODELLED, **METHODS}.items():
        costs = costs_of(reducer, model, steps)
        processor_ms[name] = round(1e3 * sum(costs.before + costs.after), 2)
        seconds[name] = {}
        for network, profile in NETWORKS.items():
            found, sent[name] = step_s(reducer, costs, model, network_profile(profile), steps)
            seconds[name][network] = found
    faster = {
        name: {network: seconds[DDP][network] / found for network, found in by_network.items()}
        for name, by_network in seconds.items()
    }
    _show(faster, sent, processor_ms)
    config = {
        "model": "cifar10/resnet20",
        "nodes": NODES,
        "batch": BATCH,
        "seeds": [SEED],
        "steps": steps,
        "networks": NETWORKS,
        "compute_ms": round(1e3 * model.compute_s, 2),
        "processor_ms": processor_ms,
        "bytes_sent": sent,
        "times_faster_than_ddp": {
            name: {network: round(ratio, 3) for network, ratio in ratios.items()}
            for name, ratios in faster.items()
        },
        "modelled": [DDP, FP16_HOOK, POWERSGD_HOOK],
    }
    results = {}
    for row, network in ROWS.items():
        best = max(METHODS, key=lambda name: faster[name][network])
        ratio = faster[best][network]
        results[row] = Measured(ratio, (ratio, ratio), {**config, "codec": best}, simulated=True)
    return results


def _show(
    faster: Mapping[str, Mapping[str, float]], sent: Mapping[str, int], processor_ms: Mapping[str, float]
) -> None:
    """Where compression pays, and in red where it loses."""
    table = Table(title="times faster than DDP (simulated)", title_justify="left")
    for column in ("method", *NETWORKS, "bytes sent", "processor ms"):
        table.add_column(column, justify="left" if column == "method" else "right")
    for name, ratios in faster.items():
        cells = [
            f"[red]{ratios[n]:.2f}, loses[/]" if ratios[n] < 0.995 else f"{ratios[n]:.2f}" for n in NETWORKS
        ]
        table.add_row(name, *cells, f"{sent[name]:,}", f"{processor_ms[name]:.1f}")
    Console(stderr=True, width=120).print(table)


if __name__ == "__main__":
    sys.exit(
        main(
            Path(__file__).parent,
            {tuple(ROWS): measure},
            sources=[
                "src/farflung/codecs/*.py",
                "src/farflung/reducers/*.py",
                "src/farflung/comm/collectives/*.py",
            ],
            minutes={tuple(ROWS): 1.0},
        )
    )
