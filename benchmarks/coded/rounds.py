"""How long an iteration takes under stragglers: both products, in virtual time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.coded.codes import REPLICATION
from benchmarks.coded.world import Body, noise, run
from benchmarks.common import Measured
from farflung.coded.coordinator import Coordinator, Settings
from farflung.devices import DeviceProfile, VaryingStraggler
from farflung.network import Link
from farflung.types import Runtime

__all__ = [
    "DEVICE",
    "DEVICES",
    "FEATURES",
    "PIECES",
    "ROWS",
    "Coded",
    "both_products",
    "in_pieces",
    "whole_blocks",
]

DEVICES = 12
ROWS, FEATURES = 1920, 192
"""Blocks of 8 or 12 are equal, and those of 8 are cut in equal pieces."""
DATA_S = 8.0
"""What one device takes for one product of all data, where nothing slows it down."""
DEVICE = DeviceProfile("phone", forward_s=DATA_S / ROWS, stragglers=(VaryingStraggler(1.0),))
LINK = Link(latency_s=0.001, bandwidth_bps=1e9)
PIECES = 12
"""As many as devices, so that each begins with another one."""
SEEDS, ITERATIONS = range(3), 60
K_TRIED = (6, 7, 8, 9, 10, 11)
REST_S = 60.0
"""Longer than any block takes."""


@dataclass(frozen=True, slots=True)
class Coded:
    """A code and its K."""

    code: str
    partitions: int

    def settings(self, pieces: int) -> Settings:
        """Every device has one block of rows and one of columns."""
        return Settings(
            partitions=self.partitions,
            devices=DEVICES,
            code=REPLICATION if self.code == "replication" else self.code,
            redundancy=0,
            pieces=pieces,
            min_timeout_s=60.0,
        )


UNCODED = Coded("rlnc", DEVICES)
"""As many partitions as devices: there is no coded block."""


def both_products(iterations: int, pause_s: float = 0.0) -> Body[list[float]]:
    """Multiplies both ways, time after time; the seconds of each iteration.

    Args:
      iterations: how many.
      pause_s: for so long nothing is asked before each product; it does not count. In it a device ends what it was at.
    """

    async def body(coordinator: Coordinator, runtime: Runtime) -> list[float]:
        operand = torch.ones(coordinator.features, 1, dtype=torch.float64)
        seconds = []
        for _ in range(iterations):
            spent = 0.0
            product = operand
            for multiply in (coordinator.multiply, coordinator.multiply_transposed):
                if pause_s:
                    await runtime.sleep_until(runtime.read_clock() + pause_s)
                begin = runtime.read_clock()
                product = await multiply(product)
                spent += runtime.read_clock() - begin
            seconds.append(spent)
        return seconds

    return body


def times(one: Coded, pieces: int, quick: bool, pause_s: float = 0.0) -> list[list[float]]:
    """Of each iteration, by seed of the stragglers."""
    parts = noise(ROWS, FEATURES, one.partitions)
    settings, iterations = one.settings(pieces), 3 if quick else ITERATIONS
    return [
        run(parts, settings, both_products(iterations, pause_s), device=DEVICE, link=LINK, seed=seed).found
        for seed in (SEEDS[:2] if quick else SEEDS)
    ]


def summary(seconds: Sequence[Sequence[float]]) -> dict[str, float]:
    """Mean, median and quartiles of all iterations."""
    every = [second for ran in seconds for second in ran]
    low, middle, high = statistics.quantiles(every, n=4)
    return {"mean_s": statistics.fmean(every), "low_s": low, "median_s": middle, "high_s": high}


def faster(slow: Sequence[Sequence[float]], fast: Sequence[Sequence[float]]) -> list[float]:
    """Mean iteration times of one over those of the other, seed by seed, in order."""
    return sorted(
        statistics.fmean(one) / statistics.fmean(other) for one, other in zip(slow, fast, strict=True)
    )


def _measured(ratios: list[float], config: dict[str, Any]) -> Measured:
    low, middle, high = statistics.quantiles(ratios, n=4)
    return Measured(
        middle, (low, high), {**_common(), **config, "times_faster_by_seed": ratios}, simulated=True
    )


def _common() -> dict[str, Any]:
    return {
        "devices": DEVICES,
        "rows": ROWS,
        "features": FEATURES,
        "seconds_for_all_data": DATA_S,
        "stragglers": "1 + Exp(1), drawn for each device and product",
        "latency_s": LINK.latency_s,
        "bandwidth_bps": LINK.bandwidth_bps,
        "seeds": list(SEEDS),
        "iterations_of_a_seed": ITERATIONS,
    }


def in_pieces(quick: bool) -> Mapping[str, Measured]:
    """Coded answers come in pieces; uncoded ones are the same in pieces or whole, as all of them are waited for."""
    base = times(UNCODED, 1, quick)
    tried = {
        "rlnc": Coded("rlnc", 8),
        "mds": Coded("mds", 8),
        "replication": Coded("replication", 6),
    }
    found = {name: times(one, PIECES, quick) for name, one in tried.items()}
    config: dict[str, Any] = {
        "pieces": PIECES,
        "partitions": {name: one.partitions for name, one in tried.items()},
        "iteration": {"uncoded, whole": summary(base), **{name: summary(one) for name, one in found.items()}},
        "times_faster": {name: statistics.median(faster(base, one)) for name, one in found.items()},
    }
    if not quick:
        config["times_faster_by_pieces"] = {
            str(pieces): statistics.median(faster(base, times(tried["rlnc"], pieces, quick)))
            for pieces in (2, 24)
        }
    row = "iteration time under stragglers, both products, answers in pieces, RLNC over uncoded, N=12, K=8"
    return {row: _measured(faster(base, found["rlnc"]), config)}


def whole_blocks(quick: bool) -> Mapping[str, Measured]:
    """A block is answered as a whole; of all K the one that is fastest in the median counts."""
    base = times(UNCODED, 1, quick)
    every = K_TRIED[2:3] if quick else K_TRIED
    found = {
        code: {k: times(Coded(code, k), 1, quick) for k in (every if code != "replication" else (6,))}
        for code in ("rlnc", "mds", "replication")
    }
    medians = {
        code: {k: statistics.median(faster(base, seconds)) for k, seconds in by_k.items()}
        for code, by_k in found.items()
    }
    rested_base = times(UNCODED, 1, quick, REST_S)
    rested = {
        code: {
            k: statistics.median(faster(rested_base, times(Coded(code, k), 1, quick, REST_S))) for k in by_k
        }
        for code, by_k in found.items()
    }
    best = max(medians["rlnc"], key=lambda k: medians["rlnc"][k])
    config: dict[str, Any] = {
        "best_k": best,
        "times_faster_by_k": {
            code: {str(k): ratio for k, ratio in by_k.items()} for code, by_k in medians.items()
        },
        "times_faster_by_k_from_rest": {
            code: {str(k): ratio for k, ratio in by_k.items()} for code, by_k in rested.items()
        },
        "iteration": {"uncoded": summary(base), "rlnc": summary(found["rlnc"][best])},
    }
    row = "iteration time under stragglers, whole-block answers, RLNC over uncoded, N=12"
    return {row: _measured(faster(base, found["rlnc"][best]), config)}
