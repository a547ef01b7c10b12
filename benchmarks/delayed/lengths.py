"""How what a delay costs shrinks with the length of a training, and what else it hangs on."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.common import Measured, Trial
from benchmarks.delayed.accuracy import SEEDS, Accuracies
from benchmarks.delayed.pictures import draw

__all__ = ["ROWS", "length_row", "lengths"]

REFERENCE = "synchronous"
SCHEDULES = {
    REFERENCE: "synchronous",
    "delay 5": "delayed(delay=5)",
    "delay 20": "delayed(delay=20)",
    "delay 5, swap": "delayed(delay=5, pull='swap')",
    "delay 20, swap": "delayed(delay=20, pull='swap')",
}
LONG = (REFERENCE, "delay 20", "delay 20, swap")
USUAL = Trial(workload="fashion-mnist/cnn", steps=500, learning_rate=0.04)


@dataclass(frozen=True)
class Compared:
    """Trainings that differ in their schedule alone.

    Args:
      trial: what they have in common, with the learning rate that the search for each begins at.
      schedules: keys of :data:`SCHEDULES`.
      seeds: of each, at the rate that is best for the first.
    """

    trial: Trial
    schedules: Sequence[str] = tuple(SCHEDULES)
    seeds: Sequence[int] = SEEDS

    def found(self, *, quick: bool) -> Accuracies:
        """Their accuracies."""
        found = Accuracies(quick, self.trial, self.seeds)
        for name in self.schedules:
            found.of(name, schedule=SCHEDULES[name])
        return found


ROWS: dict[int, Compared] = {
    6000: Compared(replace(USUAL, steps=6000), (REFERENCE, "delay 5", "delay 20", "delay 20, swap")),
    20000: Compared(replace(USUAL, steps=20000), (REFERENCE, "delay 20")),
}
"""By steps."""
SHORT: dict[int, Compared] = {500: Compared(USUAL), 1500: Compared(replace(USUAL, steps=1500))}
"""By steps."""
OTHERS = {
    "momentum 0": Compared(replace(USUAL, momentum=0.0, learning_rate=0.16), LONG),
    "momentum 0.5": Compared(replace(USUAL, momentum=0.5, learning_rate=0.08), LONG),
    "unlike data": Compared(replace(USUAL, steps=1500, partition="dirichlet(alpha=0.5)"), LONG, SEEDS[:1]),
    "language": Compared(
        replace(USUAL, workload="tinyshakespeare/lstm", learning_rate=0.64), LONG, SEEDS[:1]
    ),
}
"""By what differs from the usual training."""


PICTURE = Path(__file__).parents[2] / "docs" / "delay.png"


def length_row(steps: int) -> str:
    """Its name in ``expected.toml``."""
    return f"accuracy lost at D=20 after {steps:,} steps, fashion-mnist/cnn"


def lengths(steps: int, quick: bool) -> Mapping[str, Measured]:
    """Delayed updates against synchronous SGD, each at its best rate; the last row has all others too, as a picture."""
    found = ROWS[steps].found(quick=quick)
    row = found.difference(REFERENCE, "delay 20")
    if steps == max(ROWS) and not quick:
        by_steps = {number: _told(compared) for number, compared in {**SHORT, **ROWS}.items()}
        others = {name: _told(compared) for name, compared in OTHERS.items()}
        row.config.update(by_steps=by_steps, others=others)
        draw(PICTURE, by_steps, others)
    return {length_row(steps): row}


def _told(compared: Compared) -> dict[str, Any]:
    """Accuracies and the rates they were found at, and points lost to synchronous SGD in the mean of the seeds."""
    found = compared.found(quick=False)
    reference = statistics.fmean(found.found[REFERENCE])
    lost = {name: reference - statistics.fmean(one) for name, one in found.found.items()}
    return {**asdict(compared), "accuracy": found.found, "best_rate": found.rates, "lost": lost}
