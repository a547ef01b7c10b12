"""What farflung costs beside DistributedDataParallel and gloo, on loopback."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Measured, main, torchrun
from benchmarks.common.shaped import in_lab
from benchmarks.overhead.large import DDP, DDP_VIEWS, compare_checkpoints
from farflung.network import Link, NetworkProfile, Site, find_network

ROUNDS = 21
ROWS = {
    "attach, 2 processes, resnet20, batch 32": (2, "attach:resnet20", 1.5),
    "attach, 4 processes, resnet20, batch 32": (4, "attach:resnet20", 3.0),
    "farflung train, 2 processes, resnet20, batch 32": (2, "train:cifar10/resnet20", 1.5),
    "farflung train, 4 processes, resnet20, batch 32": (4, "train:cifar10/resnet20", 3.0),
    "attach, 2 processes, MLP 784-256-10, batch 32": (2, "attach:mlp", 0.3),
    "attach, 4 processes, MLP 784-256-10, batch 32": (4, "attach:mlp", 0.8),
    "attach, 4 processes, resnet20, batch 32, encrypted": (4, "attach:resnet20+encrypted", 3.0),
    "all-reduce of 4 kB, 4 processes, loopback": (4, "all_reduce:auto:4096", 0.5),
    "all-reduce of 44 MB, 4 processes, loopback": (4, "all_reduce:auto:44000000", 0.5),
    "all-reduce of 44 MB, 4 processes, loopback, encrypted, over gloo in the clear": (
        4,
        "all_reduce:auto:44000000+encrypted",
        0.8,
    ),
    "attach, 4 processes, MLP 784-256-10, batch 32, encrypted, over DDP in the clear": (
        4,
        "attach:mlp+encrypted",
        0.8,
    ),
    "attach, 2 processes, 1,000 tensors of 1,000 numbers, synchronous": (2, "attach:tensors", 1.5),
}
"""How many processes do what, and about how many minutes that takes."""


def measure(name: str, quick: bool) -> Mapping[str, Measured]:
    """One row: medians over rounds in which both sides run in turn, with the quartiles as spread."""
    processes, what, _ = ROWS[name]
    if quick:
        if processes > 2 and any(fewer == 2 and same == what for fewer, same, _ in ROWS.values()):
            return {}
        processes = 2
    rounds, shorter = (1, 8) if quick else (ROUNDS, 1)
    (result,) = torchrun(processes, "benchmarks.overhead.worker", what, str(rounds), str(shorter))
    config = {"processes": processes, "what": what, "rounds": rounds, "seeds": [0], **result}
    return {name: Measured(result["ratio"], (result["spread"][0], result["spread"][1]), config)}


ATTACH, ALL_REDUCE = "synchronous, 4 replicas, resnet8", "all-reduce of 4 MB, 4 nodes, 50 ms, 20 Mbit/s"
LINKS: Mapping[str, tuple[NetworkProfile | None, str, int]] = {
    f"{ATTACH}, 10 Mbit/s": (find_network("wifi-10mbps").with_nodes(4), "attach:resnet8+lab", 11),
    f"{ATTACH}, 20 Mbit/s": (NetworkProfile.create_uniform(Link(0.005, 20e6), 4), "attach:resnet8+lab", 11),
    f"{ATTACH}, 100 Mbit/s": (find_network("wifi-100mbps").with_nodes(4), "attach:resnet8+lab", ROUNDS),
    f"{ATTACH}, loopback": (None, "attach:resnet8", ROUNDS),
    ALL_REDUCE: (
        NetworkProfile("20 Mbit/s", (Site("all", None, Link(0.05), up_bps=20e6, down_bps=20e6),)).with_nodes(
            4
        ),
        "all_reduce:auto:4000000+lab",
        7,
    ),
}
"""The network of each row, what runs there, and in how many rounds."""
BURDENS = {"wakes a replica": "wakes", "processor time of all": "cpu_ratio_of_all"}
"""Rows of each of them beside the step time over DDP or the seconds, and what the worker calls them."""


def measure_links(name: str, quick: bool) -> Mapping[str, Measured]:
    """Rows of one network: wakes of the communication thread, processor time of all replicas, and time."""
    network, what, rounds = LINKS[name]
    if quick and network is not None:
        return {}
    arguments = ("benchmarks.overhead.worker", what, *(("1", "8") if quick else (str(rounds), "1")))
    said = torchrun(4, *arguments) if network is None else in_lab(network, 4, *arguments)[0]
    config = {"processes": 4, "what": what, "rounds": rounds, "seeds": [0], **said[0]}
    spread = None if name == ALL_REDUCE else tuple(config["spread"])
    rows = {name: Measured(config["wall_s"] if name == ALL_REDUCE else config["ratio"], spread, config)}
    return rows | {f"{name}: {row}": Measured(config[key], None, config) for row, key in BURDENS.items()}


GPT2_ROUNDS = 5
RECIPES = (
    "synchronous",
    "synchronous(codec=int8)",
    "synchronous(codec=error_feedback(topk(0.01)))",
    "powersgd",
    "pipe_sgd",
    "local_sgd(4)",
    "diloco(sync_every=4)",
    "delayed(delay=2)",
)
"""With which GPT-2 of 124 million parameters is attached."""
FIGURES = {
    "step time over DDP": "ratio",
    "seconds of attach": "attach_s",
    "most memory while attaching": "attach_models",
    "memory held while training": "held_models",
}
"""Rows of each of them, and what the worker calls them."""


def measure_gpt2(how: str, quick: bool) -> Mapping[str, Measured]:
    """Rows of one recipe, in two processes; memory is that beside the model, its gradients among it, in models."""
    if quick and how != RECIPES[0]:
        return {}
    what = f"gpt2:{'small:' if quick else ''}{how}"
    rounds, shorter = (1, 4) if quick else (GPT2_ROUNDS, 1)
    (result,) = torchrun(2, "benchmarks.overhead.worker", what, str(rounds), str(shorter))
    config = {"processes": 2, "what": what, "rounds": rounds, "seeds": [0], **result}
    spreads = {"ratio": (result["spread"][0], result["spread"][1])}
    return {
        f"GPT-2 124M, {how}, {figure}": Measured(result[name], spreads.get(name), config)
        for figure, name in FIGURES.items()
    }


PEAK_STEPS = 8
SYSTEMS = (DDP, DDP_VIEWS, *RECIPES, "streaming_diloco(sync_every=4, fragments=2, delay=1)")
MODELS = {"403 MB": "matrices", "GPT-2 124M": "gpt2"}
"""Whose peak memory is measured with each system; the first has 24 matrices."""


def measure_peak(model: str, system: str, quick: bool) -> Mapping[str, Measured]:
    """One row: most memory of rank 0 in two processes, beside the model, in models."""
    result = _train_large(model, system, PEAK_STEPS, 0, quick)
    return {f"{model}, {system}, peak memory": Measured(result["peak_models"], None, result)}


ROUND = "403 MB, diloco, a round after the first, loopback"
ROUND_COUNT = 11


def measure_round(quick: bool) -> Mapping[str, Measured]:
    """One row: the median of the rounds behind the first, with the quartiles as spread."""
    result = _train_large("403 MB", "diloco(sync_every=2)", 2, 3 if quick else ROUND_COUNT, quick)
    low, middle, high = statistics.quantiles(result["round_over_gloo"], n=4)
    return {ROUND: Measured(middle, (low, high), result)}


def _train_large(model: str, system: str, steps: int, rounds: int, quick: bool) -> dict[str, Any]:
    what = (MODELS[model] + " small" * quick, system, str(steps), str(rounds))
    (result,) = torchrun(2, "benchmarks.overhead.large", *what)
    return {"processes": 2, "what": what, "seeds": [0], **result}


CHECKPOINT = "800 MB of state, checkpoint written and synced"
CHECKPOINT_ROUNDS = 11


def measure_checkpoint(quick: bool) -> Mapping[str, Measured]:
    """One row: medians over rounds in which both write in random order, with the quartiles as spread."""
    ours_s, torch_s = compare_checkpoints(*((1 << 20, 3) if quick else (800_000_000, CHECKPOINT_ROUNDS)))
    ratios = [ours / theirs for ours, theirs in zip(ours_s, torch_s, strict=True)]
    low, middle, high = statistics.quantiles(ratios, n=4)
    config = {"seeds": [], "rounds": len(ratios), "ours_s": ours_s, "torch_s": torch_s}
    return {CHECKPOINT: Measured(middle, (low, high), config)}


CANARIES = ("preset synchronous", "synchronous")
BENCHMARK = Benchmark(
    Path(__file__).parent,
    [
        Group((name,), partial(measure, name), "measured", minutes, CANARIES)
        for name, (_, _, minutes) in ROWS.items()
    ]
    + [
        Group(
            (name, *(f"{name}: {row}" for row in BURDENS)),
            partial(measure_links, name),
            "measured",
            3.0,
            CANARIES,
        )
        for name in LINKS
    ]
    + [
        Group(
            tuple(f"GPT-2 124M, {how}, {figure}" for figure in FIGURES),
            partial(measure_gpt2, how),
            "measured",
            3.0,
            CANARIES,
        )
        for how in RECIPES
    ]
    + [
        Group(
            (f"{model}, {system}, peak memory",),
            partial(measure_peak, model, system),
            "measured",
            1.0,
            CANARIES,
        )
        for model in MODELS
        for system in SYSTEMS
    ]
    + [
        Group((ROUND,), measure_round, "measured", 1.5, ("preset diloco",)),
        Group((CHECKPOINT,), measure_checkpoint, "measured", 1.5, CANARIES),
    ],
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
