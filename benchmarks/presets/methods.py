"""The recipes that are compared on language, and the settings that each is tuned over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["FP16", "METHODS", "NETWORKS", "REFERENCE", "Setting"]

REFERENCE = "synchronous"
FP16 = "synchronous(codec=truncate16)"
"""DDP with its fp16 hook, by the bytes and times of 16 bits a gradient; its loss is taken as that of the reference."""
NETWORKS = ("wifi-10mbps", "four-regions", "shanghai-boston")
"""Between the four replicas."""
RATES = (0.002, 0.004, 0.008, 0.016)


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


def _rates(recipe: str, rates: Sequence[float] = RATES, optimizer: str = "") -> tuple[Setting, ...]:
    return tuple(Setting(recipe, rate, optimizer) for rate in rates)


def _outer(recipe: str, optimizer: str = "", rates: Sequence[float] = (0.004, 0.008)) -> tuple[Setting, ...]:
    """Two inner rates by two outer ones."""
    return tuple(
        Setting(recipe.format(outer_rate), rate, optimizer) for rate in rates for outer_rate in (0.4, 0.7)
    )


METHODS: dict[str, tuple[Setting, ...]] = {
    REFERENCE: _rates("synchronous"),
    "powersgd": _rates("powersgd"),
    "local_sgd": _rates("local_sgd"),
    "diloco": _outer("diloco(schedule=diloco(sync_every=50, outer_rate={}))"),
    "muloco": _outer(
        "diloco(schedule=diloco(sync_every=50, outer_rate={}), codec=error_feedback(sign(bucket_size=1024)))",
        "benchmarks.presets.muon:MuonAdamWSettings",
    ),
    "streaming_diloco": _outer(
        "streaming_diloco(schedule=streaming_diloco(sync_every=48, fragments=4, outer_rate={}))"
    ),
    "sparse_loco": _rates("sparse_loco"),
    "demo": _rates("demo", (0.0005, 0.001, 0.002, 0.004), "sign_sgd"),
}
"""A grid of four settings each."""
