"""Which methods learn as well as synchronous SGD: trainings in virtual time, each method at its own best rate.

python -m benchmarks.compression_pays.accuracy METHOD ...    # trains these ahead of the times
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.common import Trainings, Trial
from benchmarks.compression_pays.methods import METHODS, OWN_MOMENTUM, SYNCHRONOUS

__all__ = ["TRAININGS", "Equality", "Hooked", "Learned"]

Curve: TypeAlias = list[tuple[int, float]]
WORKLOAD, REPLICAS, BATCH, STEPS, MOMENTUM = "cifar10/resnet8", 4, 8, 2000, 0.9
RATES = (0.0125, 0.025, 0.05, 0.1, 0.2, 0.4, 0.8)
FIRST_RATE = 0.025
SEEDS = (0, 1, 2)
EQUAL_POINTS = 1.0
"""How much less accurate than synchronous SGD a method may be on average to count as equal."""
HOPELESS_POINTS = 2.5
"""How much less with the first seed, each at its best rate, so that the other seeds are not tried. They have other
models and orders of samples, which are the same for all methods, so differences between methods vary less."""
FAR_POINTS = 10.0
"""How much less at the first rate, so that no other rate is tried."""
TIGHTER = {
    "powersgd, rank 1": "powersgd, rank 2",
    "powersgd, rank 2": "powersgd, rank 4",
    "sign, error feedback, in two phases": "sign, error feedback, gathered",
    "topk, 0.1%, error feedback, gathered": "topk, 1%, error feedback, gathered",
    "topk, 1%, then int8, error feedback": "topk, 1%, error feedback, gathered",
    "topk, 1%, error feedback, in two phases": "topk, 1%, error feedback, gathered",
    "topk, 1%, error feedback, gathered": "by_role, convolutions topk 1%",
}
"""Methods that send less of the same than another, and are not equal where that is not."""


@dataclass(frozen=True)
class Hooked:
    """One training with a method.

    Args:
      method: by its name in tables.
      learning_rate: of the first step; falls linearly to 0.
      seed: of the model and the order of samples, so the same for all methods.
      steps: updates.
    """

    method: str
    learning_rate: float
    seed: int
    steps: int = STEPS

    @property
    def title(self) -> str:
        """All of it but the steps."""
        return f"{self.method}, rate {self.learning_rate:g}, seed {self.seed}"

    def train(self) -> Curve:
        """The test accuracy at the end, in percent, after the number of steps."""
        return self._trial.train()

    @property
    def _trial(self) -> Trial:
        return Trial(
            {"reducer": METHODS[self.method]},
            WORKLOAD,
            REPLICAS,
            BATCH,
            self.steps,
            self.learning_rate,
            momentum=0.0 if self.method in OWN_MOMENTUM else MOMENTUM,
            seed=self.seed,
        )


TRAININGS: Trainings[Hooked, Curve] = Trainings(
    Path(__file__).parent / "results" / "trainings.jsonl",
    Hooked,
    lambda training: ("preset synchronous", "preset powersgd", "topk, residuals", "shared_scale_qsgd"),
)


@dataclass(frozen=True)
class Learned:
    """What a method came to.

    Args:
      rates: those tried with the first seed, and the accuracy of each in percent.
      accuracies: of each seed at the best of them; of the first alone where that is hopeless.
    """

    rates: Mapping[float, float]
    accuracies: list[float]

    @property
    def rate(self) -> float:
        """The best."""
        return _best_of(self.rates)

    @property
    def mean(self) -> float:
        """Of all seeds, in percent."""
        return statistics.fmean(self.accuracies)

    def to_json(self) -> dict[str, Any]:
        """For a row's configuration."""
        return {"rate": self.rate, "accuracies": self.accuracies, "of_rates": dict(self.rates)}


class Equality:
    """Compares methods with synchronous SGD.

    Args:
      trainings: that are stored.
    """

    def __init__(self, trainings: Trainings[Hooked, Curve] = TRAININGS) -> None:
        self._trainings = trainings
        self.learned: dict[str, Learned] = {}
        """Of all methods that have been asked for."""

    def holds(self, method: str) -> bool:
        """Whether the mean of all seeds is within a point of synchronous SGD's own best."""
        goal = self._best(SYNCHRONOUS)
        looser = TIGHTER.get(method)
        if looser is not None and not self.holds(looser):
            return False
        learned = self._best(method, goal.accuracies[0])
        return len(learned.accuracies) == len(SEEDS) and learned.mean >= goal.mean - EQUAL_POINTS

    def _best(self, method: str, goal: float = 0.0) -> Learned:
        """At the rate that is better than its neighbours on the grid for the first seed, where the goal is near."""
        if method not in self.learned:
            rates = self._accuracies(method, [FIRST_RATE], SEEDS[0])
            near = rates[FIRST_RATE] >= goal - FAR_POINTS
            while near and (more := [rate for rate in _around(_best_of(rates)) if rate not in rates]):
                rates |= self._accuracies(method, more, SEEDS[0])
            best = _best_of(rates)
            seeds = SEEDS[1:] if rates[best] >= goal - HOPELESS_POINTS else ()
            others = self._trainings.curves([Hooked(method, best, seed) for seed in seeds])
            self.learned[method] = Learned(rates, [rates[best], *(curve[-1][1] for curve in others)])
        return self.learned[method]

    def _accuracies(self, method: str, rates: list[float], seed: int) -> dict[float, float]:
        found = self._trainings.curves([Hooked(method, rate, seed) for rate in rates])
        return {rate: curve[-1][1] for rate, curve in zip(rates, found, strict=True)}


def _best_of(rates: Mapping[float, float]) -> float:
    return max(rates, key=lambda rate: rates[rate])


def _around(rate: float) -> list[float]:
    """It and its neighbours on the grid."""
    place = RATES.index(rate)
    return list(RATES[max(0, place - 1) : place + 2])


def main() -> None:
    """Prints of each method what it came to, and whether that is equal."""
    equality = Equality()
    for method in sys.argv[1:]:
        holds = equality.holds(method)
        learned = equality.learned.get(method)
        came_to = {} if learned is None else learned.to_json()
        print(json.dumps({"method": method, "equal": holds, **came_to}), flush=True)


if __name__ == "__main__":
    main()
