"""How what a delay costs shrinks with the length of a training, and what else it hangs on."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from scipy.optimize import curve_fit

from benchmarks.common import Measured, Trial, load_expected
from benchmarks.common.trials import RATES
from benchmarks.delayed.accuracy import LAGS, SEEDS, Accuracies, lagging
from benchmarks.delayed.pictures import draw

__all__ = ["LAW_ROW", "ROWS", "Law", "law", "length_row", "lengths", "long", "long_rows"]

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
    20000: Compared(replace(USUAL, steps=20000, learning_rate=0.02), (REFERENCE, "delay 5", "delay 20")),
}
"""By steps; after the most, synchronous SGD has converged."""
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


LONGEST = max(ROWS)
FIVE_SEEDS = (0, 1, 2, 3, 4)
LAW_ROW = "steps after which D=20 loses 0.3 points, by the law, fashion-mnist/cnn"
PICTURE = Path(__file__).parents[2] / "docs" / "delay.svg"


def length_row(delay: int, steps: int) -> str:
    """Its name in ``expected.toml``."""
    if (delay, steps) == (5, 6000):
        return "accuracy lost at D=5, compensated, 6,000 steps"
    return f"accuracy lost at D={delay} after {steps:,} steps, fashion-mnist/cnn"


def lengths(steps: int, quick: bool) -> Mapping[str, Measured]:
    """Delayed updates against synchronous SGD, each at its best rate."""
    found = ROWS[steps].found(quick=quick)
    return {length_row(delay, steps): found.difference(REFERENCE, f"delay {delay}") for delay in (5, 20)}


def long_rows(number: int) -> tuple[str, str]:
    """The rows of a delay alone and a period alone in a training that converges."""
    by_delay, by_period = lagging(number)
    return f"{by_delay}, {LONGEST:,} steps", f"{by_period}, {LONGEST:,} steps"


def long(number: int, quick: bool) -> Mapping[str, Measured]:
    """A delay alone and a period alone against synchronous SGD, after the most steps.

    The rate of the largest number is searched, with five seeds; below, it is that of synchronous SGD, so that what is
    lost there is an upper bound.
    """
    trial, largest = ROWS[LONGEST].trial, number == max(LAGS)
    found = Accuracies(quick, trial, FIVE_SEEDS if largest else SEEDS)
    rates = RATES if largest else (trial.learning_rate,)
    found.of(REFERENCE, schedule=SCHEDULES[REFERENCE])
    found.of("delay", rates, schedule=f"delayed(delay={number})")
    found.of("period", rates, schedule=f"delayed(delay=0, period={number})")
    reason = found.unconverged(REFERENCE)
    names = zip(long_rows(number), ("delay", "period"), strict=True)
    return {row: found.difference(REFERENCE, name, reason) for row, name in names}


@dataclass(frozen=True)
class Law:
    r"""Points lost to synchronous SGD by delay and length, :math:`a (D / 20)^p (N / 1000)^{-q}`.

    Args:
      a: points lost at a delay of 20 after 1,000 steps.
      p: exponent of the delay.
      q: exponent of the steps.
    """

    a: float
    p: float
    q: float

    @classmethod
    def fitted(cls, points: Sequence[tuple[int, int, float]]) -> Law:
        """The least squares fit to delays, steps and points lost."""
        delays, steps, lost = zip(*points, strict=True)
        at = (numpy.array(delays), numpy.array(steps))
        found, _ = curve_fit(lambda at, a, p, q: cls(a, p, q).lost(*at), at, lost, p0=(1.0, 0.5, 0.5))
        return cls(*map(float, found))

    def lost(self, delay: Any, steps: Any) -> Any:
        """In points; of numbers or arrays of them."""
        return self.a * (delay / 20) ** self.p * (steps / 1000) ** -self.q

    def steps(self, delay: float, lost: float) -> float:
        """The steps after which a delay loses so many points."""
        return float(1000 * (self.a * (delay / 20) ** self.p / lost) ** (1 / self.q))


def law(quick: bool) -> Mapping[str, Measured]:
    """Where the law crosses 0.3 points; draws it beside all trainings of other lengths, and other trainings."""
    if quick:
        return {LAW_ROW: Measured(Law(1.0, 0.5, 0.5).steps(20, 0.3), None)}
    by_steps = {number: _told(compared) for number, compared in {**SHORT, **ROWS}.items()}
    others = {name: _told(compared) for name, compared in OTHERS.items()}
    lost = {
        (delay, steps): by_steps[steps]["lost"][f"delay {delay}"] for steps in by_steps for delay in (5, 20)
    }
    for number in LAGS:
        measured = long(number, quick=False)[long_rows(number)[0]].ours
        assert measured is not None
        lost[number, LONGEST] = measured
    points = [(*at, found) for at, found in lost.items()]
    fitted = Law.fitted(points)
    papers = {row.name: row.published for row in load_expected(Path(__file__).parent)}
    published = [papers[long_rows(number)[0]] or 0.0 for number in LAGS]
    draw(PICTURE, by_steps, others, fitted.lost, published)
    config = {"law": asdict(fitted), "delay, steps, lost": points, "by_steps": by_steps, "others": others}
    return {LAW_ROW: Measured(fitted.steps(20, 0.3), None, config)}


def _told(compared: Compared) -> dict[str, Any]:
    """Accuracies and the rates they were found at, and points lost to synchronous SGD in the mean of the seeds."""
    found = compared.found(quick=False)
    reference = statistics.fmean(found.found[REFERENCE])
    lost = {name: reference - statistics.fmean(one) for name, one in found.found.items()}
    return {**asdict(compared), "accuracy": found.found, "best_rate": found.rates, "lost": lost}
