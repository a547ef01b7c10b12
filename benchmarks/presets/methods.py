"""The recipes that are compared on language, and the settings that each is tuned over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import TypeAlias

__all__ = ["FP16", "METHODS", "NETWORKS", "REFERENCE", "Setting"]

REFERENCE = "synchronous"
FP16 = "synchronous(codec=truncate16)"
"""DDP with its fp16 hook, by the bytes and times of 16 bits a gradient; its loss is taken as that of the reference."""
NETWORKS = ("wifi-10mbps", "four-regions", "shanghai-boston")
"""Between the four replicas."""


@dataclass(frozen=True)
class Setting:
    """One point of a grid.

    Args:
      recipe: how to train together.
      learning_rate: the highest, after the warm-up; of the inner optimizer where there are two.
      optimizer: the workload's when not given.
    """

    recipe: str
    learning_rate: float
    optimizer: str = ""


Grid: TypeAlias = Sequence[Setting]


def _grid(recipe: str, rates: Sequence[float], *options: Sequence[float], optimizer: str = "") -> Grid:
    """Every learning rate with all values of what the recipe leaves open."""
    return tuple(
        Setting(recipe.format(*chosen), rate, optimizer) for rate in rates for chosen in product(*options)
    )


RATES, OUTER_RATES, WARMUPS = (0.002, 0.004, 0.008, 0.016), (0.4, 0.7), (0, 1000)
METHODS: dict[str, Grid] = {
    REFERENCE: _grid("synchronous", RATES),
    "powersgd": _grid("powersgd", RATES),
    "local_sgd": _grid("local_sgd", RATES),
    "diloco": _grid("diloco(schedule=diloco(sync_every=50, outer_rate=0.7, warmup={}))", RATES[:2], WARMUPS),
    "muloco": [
        setting
        for warmup, codec in ((0, "sign(bucket_size=1024)"), (1000, "qsgd(bits=4)"))
        for setting in _grid(
            f"diloco(schedule=diloco(sync_every=50, outer_rate={{}}, warmup={warmup}), codec=error_feedback({codec}))",
            RATES[1:2],
            OUTER_RATES,
            optimizer="benchmarks.presets.muon:MuonAdamWSettings",
        )
    ],
    "streaming_diloco": _grid(
        "streaming_diloco(schedule=streaming_diloco(sync_every=48, fragments=4, outer_rate={}))",
        RATES[:2],
        OUTER_RATES,
    ),
    "sparse_loco": _grid(
        "sparse_loco(schedule=diloco(sync_every=50, outer_rate=1.0, outer_momentum=0.0, warmup={}))",
        RATES[:2],
        WARMUPS,
    ),
    "demo": _grid("demo", (0.0005, 0.001, 0.002, 0.004), optimizer="sign_sgd"),
}
"""A grid of four settings each."""
