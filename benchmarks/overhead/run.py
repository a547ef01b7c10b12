"""What farflung costs beside DistributedDataParallel and gloo, on loopback."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common import Benchmark, Group, Measured, main, torchrun

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


CANARIES = ("preset synchronous", "synchronous")
BENCHMARK = Benchmark(
    Path(__file__).parent,
    [
        Group((name,), partial(measure, name), "measured", minutes, CANARIES)
        for name, (_, _, minutes) in ROWS.items()
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
    ],
)

if __name__ == "__main__":
    sys.exit(main(BENCHMARK))
