"""When compression pays: step times of every codec and reducer beside DDP's, on three networks of the lab."""

from __future__ import annotations

import functools
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console
from rich.table import Table

from benchmarks.common import Benchmark, Group, Kept, Measured, main
from benchmarks.common.shaped import in_lab
from benchmarks.compression_pays.accuracy import TRAININGS, Equality
from benchmarks.compression_pays.methods import (
    AUTO,
    DDP,
    FP16_HOOK,
    METHODS,
    POWERSGD_HOOK,
    SYNCHRONOUS,
    TIGHT,
    TRUNCATE16,
)
from farflung.network import find_network

FOLDER = Path(__file__).parent
NODES, BATCH = 4, 8
NETWORKS = {"10 Mbit/s": "wifi-10mbps", "100 Mbit/s": "wifi-100mbps", "1 Gbit/s": "lan-1g"}
BEST = {
    "best codec at 10 Mbit/s": ("wifi-10mbps", NODES, 9.0),
    "best codec at 100 Mbit/s": ("wifi-100mbps", NODES, 9.0),
    "best codec at 100 Mbit/s, two replicas with a core each": ("wifi-100mbps", 2, 5.0),
}
"""The profile and the number of nodes of each row, and the minutes that they take."""
AS_ACCURATE = {
    "best codec at 10 Mbit/s over the best of DDP and its fp16 hook, equal accuracy": (
        "wifi-10mbps",
        (DDP, FP16_HOOK),
    ),
    "best codec at 100 Mbit/s over the best of DDP and its fp16 hook, equal accuracy": (
        "wifi-100mbps",
        (DDP, FP16_HOOK),
    ),
    "best farflung codec over the PowerSGD hook at 10 Mbit/s, equal accuracy": (
        "wifi-10mbps",
        (POWERSGD_HOOK,),
    ),
}
"""The profile of each row, and the references of which the fastest counts."""
WORST = {
    "auto never slower than DDP, any of the three networks": (AUTO, DDP),
    "truncate16 as hook over PyTorch's fp16 hook, worst of the three networks": (TRUNCATE16, FP16_HOOK),
    "identity as hook over DDP, worst of the three networks": (SYNCHRONOUS, DDP),
}
"""The method of each row, and its reference."""
ROUNDS = {"wifi-10mbps": 3, "wifi-100mbps": 9, "lan-1g": 9}
"""Blocks of each method: the shorter the steps are, the more they differ."""
STEPS = 3
CANARIES = ("preset synchronous", "preset powersgd", "topk, residuals", "int8 on hops", "shared_scale_qsgd")


@dataclass(frozen=True)
class Timed:
    """Blocks of one method and those of the references beside them, in seconds of a step.

    Args:
      step_s: the method's.
      beside_s: by reference; each block was measured in the same round as the method's.
      profile: where the milliseconds of a step go, by rank 0.
    """

    step_s: Sequence[float]
    beside_s: Mapping[str, Sequence[float]]
    profile: Mapping[str, float]

    def ratios(self, *references: str) -> list[float]:
        """How many times as fast as the fastest of these references in each round."""
        reference = min(references, key=lambda one: statistics.median(self.beside_s[one]))
        return [theirs / own for theirs, own in zip(self.beside_s[reference], self.step_s, strict=True)]

    def ratio(self, *references: str) -> float:
        """The median."""
        return statistics.median(self.ratios(*references))


def best_codec(row: str, quick: bool) -> Mapping[str, Measured]:
    """The fastest method of one network, and in its configuration all of them."""
    if quick:
        return {}
    profile, nodes, _ = BEST[row]
    timed = _timed(profile, nodes, quick=quick)
    best = _fastest_first(timed, DDP)[0]
    return {row: _measured(timed, best, (DDP,), profile, nodes, quick)}


def as_accurate(row: str, quick: bool) -> Mapping[str, Measured]:
    """The fastest that is as accurate as synchronous SGD; needs trainings, so not quick."""
    if quick:
        return {}
    profile, references = AS_ACCURATE[row]
    timed, equality = _timed(profile, NODES, quick=quick), Equality()
    best = next(method for method in _fastest_first(timed, *references) if equality.holds(method))
    measured = _measured(timed, best, references, profile, NODES, quick)
    measured.config["learned"] = {method: one.to_json() for method, one in equality.learned.items()}
    return {row: measured}


def worst_network(quick: bool) -> Mapping[str, Measured]:
    """Those methods that shall lose nowhere, each where it is worst, and the table of all methods on all networks."""
    networks = dict(list(NETWORKS.items())[-1:]) if quick else NETWORKS
    timed = {network: _timed(profile, NODES, quick=quick) for network, profile in networks.items()}
    _show(timed)
    found = {}
    for row, (method, reference) in WORST.items():
        worst = min(timed, key=lambda network: timed[network][method].ratio(reference))
        found[row] = _measured(timed[worst], method, (reference,), networks[worst], NODES, quick)
        found[row].config["on_each"] = {
            network: {
                "times_faster": round(methods[method].ratio(reference), 3),
                "profile": {name: methods[name].profile for name in (method, reference)},
            }
            for network, methods in timed.items()
        }
    return found


def _fastest_first(timed: Mapping[str, Timed], *references: str) -> list[str]:
    return sorted(
        METHODS.keys() & timed.keys(), key=lambda method: timed[method].ratio(*references), reverse=True
    )


@functools.cache
def _timed(profile: str, nodes: int, *, quick: bool) -> dict[str, Timed]:
    """Every method on one network; kept."""
    rounds, steps = (1, 1) if quick else (ROUNDS[profile], STEPS)
    nodes = 2 if quick else nodes
    methods = TIGHT if quick else list(METHODS)

    def measure() -> dict[str, Any]:
        lines, *_ = in_lab(
            find_network(profile), nodes, "benchmarks.compression_pays.worker", str(BATCH), str(rounds), str(steps),
            *methods,
        )  # fmt: skip
        return {"timed": {line.pop("method"): line for line in lines}}

    key = {
        "network": profile,
        "nodes": nodes,
        "batch": BATCH,
        "rounds": rounds,
        "steps": steps,
    }
    kept = Kept(FOLDER, "timings", quick=quick).once(key, measure)
    return {method: Timed(**line) for method, line in kept["timed"].items()}


def _measured(
    timed: Mapping[str, Timed],
    method: str,
    references: tuple[str, ...],
    profile: str,
    nodes: int,
    quick: bool,
) -> Measured:
    """A method beside the fastest of some references; with all methods of its network in the configuration."""
    ratios = timed[method].ratios(*references)
    config: dict[str, Any] = {
        "model": "cifar10/resnet20",
        "network": profile,
        "nodes": nodes,
        "batch": BATCH,
        "blocks": len(ratios),
        "steps": 1 if quick else STEPS,
        "codec": method,
        "over": references,
        "times_faster": {name: round(one.ratio(*references), 3) for name, one in timed.items()},
        "step_ms": {name: round(1e3 * statistics.median(one.step_s), 1) for name, one in timed.items()},
        "profile": {name: timed[name].profile for name in (method, *references)},
    }
    return Measured(statistics.median(ratios), (min(ratios), max(ratios)), config)


def _show(timed: Mapping[str, Mapping[str, Timed]]) -> None:
    """Where compression pays, and in red where it loses."""
    table = Table(
        title="times faster than the best of DDP and its fp16 hook (than DDP)", title_justify="left"
    )
    for column in ("method", *timed):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method in next(iter(timed.values())):
        cells = []
        for methods in timed.values():
            best, plain = methods[method].ratio(DDP, FP16_HOOK), methods[method].ratio(DDP)
            cells.append(
                f"[red]{best:.2f}, loses[/] ({plain:.2f})" if best < 0.98 else f"{best:.2f} ({plain:.2f})"
            )
        table.add_row(method, *cells)
    Console(stderr=True, width=120).print(table)


BENCHMARK = Benchmark(
    FOLDER,
    [
        *(
            Group((row,), functools.partial(best_codec, row), "measured", minutes, CANARIES)
            for row, (_, _, minutes) in BEST.items()
        ),
        Group(tuple(WORST), worst_network, "measured", 6.0, CANARIES),
        *(
            Group((row,), functools.partial(as_accurate, row), "measured", 0.1, CANARIES)
            for row in AS_ACCURATE
        ),
    ],
    TRAININGS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
