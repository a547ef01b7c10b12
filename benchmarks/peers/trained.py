"""Steps to the target, by unpaced trainings on loopback: ``python -m benchmarks.peers.trained NAME...`` makes them."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.common import Trainings, in_turn, torchrun
from benchmarks.peers.worker import REFERENCE, SYSTEMS, System, system_of
from benchmarks.sampling.training import Looks, best, reached

__all__ = ["BATCH", "JUDGES", "NODES", "PILOT", "RATES", "TASK", "TRAININGS", "Learned", "Trained", "learned"]

TASK, NODES, BATCH = "benchmarks.workloads.halved:cifar10", 4, 16
RATES = {"SGD": (0.025, 0.05, 0.1, 0.2), "AdamW": (0.0005, 0.001, 0.002, 0.004)}
PILOT, JUDGES = 0, (1, 2)
"""The seed that rates are tuned on, and those that judge."""
PILOT_STEPS, STEPS = 1500, 3000
"""Of trainings that tune, and of those that judge."""
PROCESSOR_S = 230
"""Of a training of DDP, by all its ranks; hivemind's take twice as many."""
WITHIN = 1.0
"""Points below the reference's own best is as good as that."""


@dataclass(frozen=True)
class Trained:
    """One training.

    Args:
      name: of the system.
      rate: of learning, the same at all steps.
      seed: of the model and of all batches.
      steps: of each replica.
      every: steps between two looks.
      batch: samples of a step and replica.
      task: a workload.
    """

    name: str
    rate: float
    seed: int
    steps: int = STEPS
    every: int = 100
    batch: int = BATCH
    task: str = TASK

    @property
    def title(self) -> str:
        """For a line of progress."""
        return f"{self.name}, rate {self.rate:g}, seed {self.seed}"

    def train(self, nodes: int = NODES) -> list[list[float]]:
        """Steps, accuracies in percent and losses; of trainings stored on 2026-11-27, no losses."""
        said = torchrun(nodes, "benchmarks.peers.worker", json.dumps(vars(self)))
        looks: list[list[float]] = next(one["looks"] for one in said if one["rank"] == 0)
        return looks


def _canaries(training: Trained) -> Sequence[str]:
    return system_of(training.name).canaries


TRAININGS: Trainings[Trained, list[list[float]]] = Trainings(
    Path(__file__).parent / "results" / "trainings.jsonl", Trained, _canaries
)
Train: TypeAlias = Callable[[Trained], Looks]


@dataclass(frozen=True)
class Learned:
    """What trainings of a system came to.

    Args:
      rate: that was best on the pilot's seed.
      tried: the best accuracy of each rate there.
      bests: the best accuracy of each seed that judges.
      target: the accuracy that counts as there.
      steps: of each of these seeds until it is there.
    """

    rate: float
    tried: Mapping[str, float]
    bests: Sequence[float]
    target: float
    steps: Sequence[int | None]

    @property
    def there(self) -> float | None:
        """The mean of steps; ``None`` where a seed does not come there."""
        steps = [one for one in self.steps if one is not None]
        return statistics.fmean(steps) if len(steps) == len(self.steps) else None


def learned(name: str, train: Train = TRAININGS.curve) -> Learned:
    """Tunes and judges a system, after the reference whose accuracy is the target; trained now unless it is stored."""
    if SYSTEMS[name].steps_of:
        return learned(SYSTEMS[name].steps_of, train)
    target = None if name == REFERENCE else learned(REFERENCE, train).target
    pilots = {rate: train(Trained(name, rate, PILOT, PILOT_STEPS)) for rate in RATES[SYSTEMS[name].optimizer]}

    def order(rate: float) -> tuple[float, float]:
        """The fewest steps until it is there, and of those that never are the best accuracy."""
        steps = None if target is None else reached(pilots[rate], target)
        return float("inf") if steps is None else steps, -best(pilots[rate])

    rate = min(pilots, key=order)
    judged = [train(Trained(name, rate, seed)) for seed in JUDGES]
    bests = [best(looks) for looks in judged]
    if target is None:
        target = statistics.fmean(bests) - WITHIN
    tried = {f"{one:g}": best(looks) for one, looks in pilots.items()}
    return Learned(rate, tried, bests, target, [reached(looks, target) for looks in judged])


def main(names: Sequence[str]) -> int:
    """Makes all trainings of systems, after an estimate; the exit code."""
    each = (len(RATES["SGD"]) * PILOT_STEPS + len(JUDGES) * STEPS) / STEPS
    print(
        f"about {len(names) * each * PROCESSOR_S:,.0f} processor seconds, without what is stored",
        file=sys.stderr,
    )

    def make(name: str, system: System) -> Any:
        system.check(name)
        return learned(name)

    return in_turn("system", names, SYSTEMS, make)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
