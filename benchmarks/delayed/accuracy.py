"""What delay, period and sparsity cost in accuracy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from scipy.stats import t as student

from benchmarks.common import Measured, Trainings, Trial, Trials
from benchmarks.common.trials import RATES
from benchmarks.delayed.times import HIDDEN

__all__ = [
    "CANARIES",
    "DELAYS",
    "LAGS",
    "REGIONS_LOST",
    "SEEDS",
    "TRAININGS",
    "Accuracies",
    "compensated",
    "compensation",
    "lag",
    "lagging",
    "regions",
]

LAGS = (4, 8, 12, 16, 20)
DELAYS = (5, 10, 15, 20)
WARM_UP = Trial().steps // 10
"""Steps that are synchronous."""
BESIDE_OTHERS = (5, 20)
"""Delays at which the swap, and the pull without a warm-up, are trained too."""
REDUCED = {"cifar10/vgg": "a small VGG for ResNet-18 and ResNet-50"}
SEEDS = (0, 1)
"""Of the least and the greatest delay, and of what they are compared with; elsewhere it is the first."""
INTERVAL_SEEDS = 5
"""From so many seeds on, an interval of the mean is told."""
CANARIES = (
    "preset synchronous",
    "preset delayed",
    "delayed, period",
    "delayed, residuals",
    "delayed, pulled",
)
TRAININGS: Trainings[Trial, list[list[float]]] = Trainings(
    Path(__file__).parent / "results" / "trainings.jsonl", Trial, lambda training: CANARIES
)


COLLAPSED = 10.0
"""Points by which a baseline that learns nothing useful is worse than synchronous SGD."""


class Accuracies:
    """The best accuracy of each recipe over the learning rates.

    Args:
      quick: a few steps of something small.
      trial: what all trainings have in common.
      seeds: of each; rates are searched with the first.
    """

    def __init__(self, quick: bool, trial: Trial | None = None, seeds: Sequence[int] = SEEDS[:1]) -> None:
        self._trials, self._seeds = Trials(TRAININGS, quick=quick), seeds
        self._trial = trial or Trial()
        self._parts: dict[str, dict[str, str]] = {}
        self.rates: dict[str, float] = {}
        self.found: dict[str, list[float]] = {}

    def of(self, name: str, rates: Sequence[float] = RATES, **parts: str) -> None:
        """Notes that of each seed, in percent, and the rate."""
        trial, self._parts[name] = replace(self._trial, parts=parts), parts
        self.found[name], self.rates[name] = self._trials.best(trial, rates, self._seeds)

    def unconverged(self, reference: str) -> str:
        """Why differences to a recipe compare with no published one; empty where they do."""
        rate = self.rates[reference]
        return self._trials.unconverged(
            replace(self._trial, parts=self._parts[reference], learning_rate=rate, seed=self._seeds[0])
        )

    def difference(self, one: str, other: str, reason: str = "") -> Measured:
        """Points by which one is better than the other.

        The spread is the 95 % interval of the mean by Student's t where there are five seeds; with fewer, it is the
        lowest and the highest.
        """
        points = [a - b for a, b in zip(self.found[one], self.found[other], strict=True)]
        mean, spread = statistics.fmean(points), (min(points), max(points))
        if len(points) >= INTERVAL_SEEDS:
            half = student.ppf(0.975, len(points) - 1) * statistics.stdev(points) / math.sqrt(len(points))
            spread = (mean - half, mean + half)
        config = {
            "workload": self._trial.workload,
            "reduced": REDUCED.get(self._trial.workload, ""),
            "replicas": self._trial.replicas,
            "steps": self._trial.steps,
            "seeds": list(self._seeds),
            "rates": list(RATES),
            "best_rate": dict(self.rates),
            "accuracy": dict(self.found),
        }
        return Measured(mean, spread, config, reason=reason)


def compensated(delay: int) -> tuple[str, str]:
    """The rows of a delay."""
    return f"accuracy lost at D={delay}, compensated", f"compensation gain at D={delay}"


def compensation(delay: int, quick: bool) -> Mapping[str, Measured]:
    """Delayed updates against no delay, and against stale means alone."""
    judged = delay in BESIDE_OTHERS
    found = Accuracies(quick, seeds=SEEDS if judged else SEEDS[:1])
    found.of("D=0", schedule="delayed(delay=0)")
    found.of("ours", schedule=f"delayed(delay={delay}, warmup={WARM_UP})")
    if judged:
        found.of("without a warm-up", schedule=f"delayed(delay={delay})")
        found.of("swap", schedule=f"delayed(delay={delay}, pull='swap')")
    found.of("stale", schedule=f"pipelined(width={delay + 1})")
    lost, gain = compensated(delay)
    reason = found.unconverged("D=0")
    stale, whole = (statistics.fmean(found.found[name]) for name in ("stale", "D=0"))
    collapsed = f"the baseline collapses: {stale:.1f} % where no delay has {whole:.1f}"
    return {
        lost: found.difference("D=0", "ours", reason),
        gain: found.difference("ours", "stale", collapsed if stale < whole - COLLAPSED else reason),
    }


def lagging(number: int) -> tuple[str, str]:
    """The rows of a delay alone and a period alone."""
    return f"accuracy lost at delay t={number}", f"accuracy lost at period d={number}"


def lag(number: int, quick: bool) -> Mapping[str, Measured]:
    """A delay alone and a period alone against synchronous SGD."""
    found = Accuracies(quick)
    found.of("synchronous", schedule="synchronous")
    found.of("delay", schedule=f"delayed(delay={number}, warmup={WARM_UP})")
    found.of("period", schedule=f"delayed(delay=0, period={number})")
    by_delay, by_period = lagging(number)
    reason = found.unconverged("synchronous")
    return {
        by_delay: found.difference("synchronous", "delay", reason),
        by_period: found.difference("synchronous", "period", reason),
    }


REGIONS_LOST = "four regions, accuracy lost"


def regions(quick: bool) -> Mapping[str, Measured]:
    """The schedule that hides the four regions' latency against synchronous SGD."""
    found = Accuracies(quick)
    found.of("synchronous", schedule="synchronous")
    found.of("ours", schedule=f"delayed(delay=20, period=8, warmup={WARM_UP})", codec=HIDDEN["codec"])
    return {REGIONS_LOST: found.difference("synchronous", "ours", found.unconverged("synchronous"))}
