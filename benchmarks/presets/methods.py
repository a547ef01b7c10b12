"""The presets that are compared on language, and what each is trained with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from farflung.recipes import recipe

__all__ = ["LEFT_OUT", "METHODS", "NETWORKS", "RATES", "REFERENCE", "Method", "parts_of"]

REFERENCE = "synchronous"
NETWORKS = ("wifi-10mbps", "four-regions", "shanghai-boston")
"""Between the four replicas."""
RATES = (0.000125, 0.00025, 0.0005, 0.001, 0.002, 0.004, 0.008, 0.016)
"""Of learning: powers of two around nanoGPT's 0.001."""


@dataclass(frozen=True)
class Method:
    """How a preset is trained.

    Args:
      optimizer: the workload's when not given.
      begins_at: the rate at which its search begins, upwards and downwards; ``None``: at the reference's best, and
        downwards alone.
      searched: whether rates are searched at all.
      by_clock: what it decides hangs on times, so each network has a training of its own.
    """

    optimizer: str | None = None
    begins_at: float | None = None
    searched: bool = True
    by_clock: bool = False


METHODS: dict[str, Method] = {
    REFERENCE: Method(begins_at=0.001),
    "ring": Method(searched=False),
    "powersgd": Method(),
    "pipe_sgd": Method(),
    "delayed": Method(by_clock=True),
    "dga": Method(),
    "local_sgd": Method(),
    "post_local_sgd": Method(),
    "adacomm": Method(by_clock=True),
    "diloco": Method(),
    "streaming_diloco": Method(),
    "sparse_loco": Method(),
    "demo": Method(optimizer="sign_sgd", begins_at=0.001),
}
"""By preset."""
LEFT_OUT = {
    "ddp": "synchronous over the backend's own all-reduce",
    "gradient_coding": "synchronous for replicas of unlike speed, each sample computed twice",
    "mercury": "which samples a step takes, for shares that are unlike",
    "parameter_server": "synchronous by another way",
    "scadles": "for samples that arrive",
    "scadles_baseline": "for samples that arrive",
    "ssp": "for replicas of unlike speed, through one server; see benchmarks/pipe_sgd",
}
"""Presets, and why."""


def parts_of(preset: str) -> Mapping[str, Any]:
    """The members of a preset's recipe."""
    return recipe(preset).settings
