"""When compression pays: step times of every codec and reducer beside DDP's, on three networks of the lab."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rich.console import Console
from rich.table import Table

from benchmarks.common import Benchmark, Group, Kept, Measured, Trainings, main, source_hash
from benchmarks.common.shaped import in_lab
from benchmarks.common.trainings import TRAINED
from benchmarks.compression_pays.accuracy import Hooked
from benchmarks.compression_pays.methods import AUTO, DDP, FP16_HOOK, METHODS, POWERSGD_HOOK
from farflung.network import network_profile

FOLDER = Path(__file__).parent
NODES, BATCH = 4, 8
NETWORKS = {"10 Mbit/s": "wifi-10mbps", "100 Mbit/s": "wifi-100mbps", "1 Gbit/s": "lan-1g"}
BEST = {
    "best codec at 10 Mbit/s": ("wifi-10mbps", NODES),
    "best codec at 100 Mbit/s": ("wifi-100mbps", NODES),
    "best codec at 100 Mbit/s, two replicas with a core each": ("wifi-100mbps", 2),
}
"""The profile and the number of nodes of each row."""
OVER_POWERSGD = "best farflung codec over the PowerSGD hook at 10 Mbit/s, equal accuracy"
NEVER_SLOWER = "auto never slower than DDP, any of the three networks"
ROUNDS = {"wifi-10mbps": 3, "wifi-100mbps": 9, "lan-1g": 9}
"""Blocks of each method: the shorter the steps are, the more they differ."""
STEPS = 3
SEEDS, TRAINING_STEPS = (0, 1), 200
EQUAL_POINTS = 0.5
"""How much less accurate a method may be on average to count as equal."""
HOPELESS_POINTS = 5.0
"""How much less accurate with the first seed, so that the others are not tried; seeds differ by less."""
SOURCES = [
    "src/farflung/codecs/*.py",
    "src/farflung/reducers/**/*.py",
    "src/farflung/comm/**/*.py",
    "src/farflung/ddp.py",
]
TRAININGS = Trainings(
    FOLDER / "results" / "accuracies.jsonl",
    Hooked,
    [*TRAINED, *(f"benchmarks/compression_pays/{name}.py" for name in ("accuracy", "methods"))],
    minutes=0.5,
)


@dataclass(frozen=True)
class Timed:
    """Blocks of one method and the DDP blocks between them, in seconds of a step."""

    ddp_s: Sequence[float]
    step_s: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """How many times as fast as the DDP block before each."""
        return [theirs / own for theirs, own in zip(self.ddp_s, self.step_s, strict=True)]

    @property
    def ratio(self) -> float:
        """The median."""
        return statistics.median(self.ratios)


Timings = dict[str, dict[str, Timed]]


def best_codec(row: str, quick: bool) -> Mapping[str, Measured]:
    """The fastest method of one network, and in its configuration all of them."""
    profile, nodes = BEST[row]
    if quick and profile == "wifi-10mbps":
        return {}
    timed = _timed(profile, nodes, quick=quick)
    best = _best(timed)
    config: dict[str, Any] = {
        "model": "cifar10/resnet20",
        "network": profile,
        "nodes": nodes,
        "batch": BATCH,
        "blocks": ROUNDS[profile],
        "steps": STEPS,
        "codec": best,
        "times_faster_than_ddp": {
            method: [round(ratio, 3) for ratio in found.ratios] for method, found in timed.items()
        },
        "step_ms": {
            method: round(1e3 * statistics.median(found.step_s), 1) for method, found in timed.items()
        },
    }
    return {row: _measured(timed[best].ratios, config)}


def never_slower(quick: bool) -> Mapping[str, Measured]:
    """The worst network of what falls back, and the table of all methods on all networks."""
    networks = dict(list(NETWORKS.items())[1:]) if quick else NETWORKS
    timed: Timings = {}
    for network, profile in networks.items():
        for method, found in _timed(profile, NODES, quick=quick).items():
            timed.setdefault(method, {})[network] = found
    _show(timed, networks)
    worst = min(networks, key=lambda network: timed[AUTO][network].ratio)
    config = {
        "method": AUTO,
        "network": worst,
        "times_faster_than_ddp": {
            method: {network: round(one.ratio, 3) for network, one in found.items()}
            for method, found in timed.items()
        },
    }
    return {NEVER_SLOWER: _measured(timed[AUTO][worst].ratios, config)}


def _best(timed: Mapping[str, Timed]) -> str:
    return max(METHODS.keys() & timed.keys(), key=lambda method: timed[method].ratio)


def _timed(profile: str, nodes: int, *, quick: bool) -> dict[str, Timed]:
    """Every method on one network; kept."""
    rounds, steps = (1, 1) if quick else (ROUNDS[profile], STEPS)
    methods = [DDP, POWERSGD_HOOK, *list(METHODS)[:2]] if quick else [DDP, FP16_HOOK, POWERSGD_HOOK, *METHODS]

    def measure() -> dict[str, Any]:
        lines, *_ = in_lab(
            network_profile(profile), nodes, "benchmarks.compression_pays.worker", str(BATCH), str(rounds), str(steps),
            *methods,
        )  # fmt: skip
        return {"blocks": {line["method"]: (line["ddp_s"], line["step_s"]) for line in lines}}

    sources = source_hash(
        [*SOURCES, "benchmarks/compression_pays/methods.py", "benchmarks/compression_pays/worker.py"]
    )
    key = {
        "network": profile,
        "nodes": nodes,
        "batch": BATCH,
        "rounds": rounds,
        "steps": steps,
        "sources": sources,
    }
    kept = Kept(FOLDER / "results" / "timings.jsonl", quick=quick).once(key, measure)
    return {method: Timed(theirs, own) for method, (theirs, own) in kept["blocks"].items()}


def _measured(ratios: Sequence[float], config: dict[str, Any]) -> Measured:
    return Measured(statistics.median(ratios), (min(ratios), max(ratios)), config)


def over_powersgd(quick: bool) -> Mapping[str, Measured]:
    """The fastest that is as accurate as PyTorch's PowerSGD hook, against that hook; needs trainings, so not quick."""
    if quick:
        return {}
    timed = _timed("wifi-10mbps", NODES, quick=quick)
    accuracies = {POWERSGD_HOOK: [_accuracy(POWERSGD_HOOK, seed) for seed in SEEDS]}
    goal = statistics.fmean(accuracies[POWERSGD_HOOK]) - EQUAL_POINTS
    for method in sorted(METHODS, key=lambda method: -timed[method].ratio):
        accuracies[method] = [_accuracy(method, SEEDS[0])]
        if accuracies[method][0] < goal - HOPELESS_POINTS:
            continue
        accuracies[method] += [_accuracy(method, seed) for seed in SEEDS[1:]]
        if statistics.fmean(accuracies[method]) >= goal:
            break
    config = {"accuracy": accuracies, "seeds": list(SEEDS), "training_steps": TRAINING_STEPS, "codec": method}
    pairs = zip(timed[method].ratios, timed[POWERSGD_HOOK].ratios, strict=False)
    return {OVER_POWERSGD: _measured([ours / theirs for ours, theirs in pairs], config)}


def _accuracy(method: str, seed: int) -> float:
    return TRAININGS.accuracy(Hooked(method, seed, TRAINING_STEPS))


def _show(timed: Timings, networks: Mapping[str, str]) -> None:
    """Where compression pays, and in red where it loses."""
    table = Table(title="times faster than DDP", title_justify="left")
    for column in ("method", *networks):
        table.add_column(column, justify="left" if column == "method" else "right")
    for method, found in timed.items():
        cells = [
            f"[red]{found[n].ratio:.2f}, loses[/]" if found[n].ratio < 0.98 else f"{found[n].ratio:.2f}"
            for n in networks
        ]
        table.add_row(method, *cells)
    Console(stderr=True, width=120).print(table)


BENCHMARK = Benchmark(
    FOLDER,
    [
        *(Group((row,), partial(best_codec, row), "measured", 8.0, SOURCES) for row in BEST),
        Group((NEVER_SLOWER,), never_slower, "measured", 6.0, SOURCES),
        Group((OVER_POWERSGD,), over_powersgd, "measured", 20.0, SOURCES),
    ],
    TRAININGS,
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
