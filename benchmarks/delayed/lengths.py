"""How the loss of accuracy shrinks with the length of a training."""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.common import Measured, Trial
from benchmarks.delayed.accuracy import SEEDS, Accuracies

__all__ = ["LENGTHS", "length_row", "lengths"]

LENGTHS = (6000, 20000)
"""Steps."""
DELAY = 20


def length_row(steps: int) -> str:
    """Its name in ``expected.toml``."""
    return f"accuracy lost at D={DELAY} after {steps:,} steps, fashion-mnist/cnn"


def lengths(steps: int, quick: bool) -> Mapping[str, Measured]:
    """Delayed updates against synchronous SGD, both at their best rate."""
    trial = Trial(workload="fashion-mnist/cnn", steps=steps, learning_rate=0.04)
    found = Accuracies(quick, trial, SEEDS)
    found.of("synchronous", schedule="synchronous")
    found.of("ours", schedule=f"delayed(delay={DELAY})")
    return {length_row(steps): found.difference("synchronous", "ours")}
