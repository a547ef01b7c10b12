"""Steps to the target, by trainings that no link slows: ``python -m benchmarks.peers.trained NAME...`` makes them."""

from __future__ import annotations

import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias

from benchmarks.common import Trainings, in_turn, torchrun
from benchmarks.common.shaped import in_lab
from benchmarks.peers.paced import STEP_S
from benchmarks.peers.worker import LARGE, NO_EXCHANGE, REFERENCE, SYSTEMS, System, system_of
from benchmarks.presets.language import EVALUATIONS, Language
from benchmarks.sampling.training import Looks, best, reached
from farflung.errors import LabError
from farflung.network import find_network

__all__ = [
    "BATCH",
    "JUDGES",
    "LARGE_TASK",
    "NODES",
    "PILOT",
    "RATES",
    "TASK",
    "TIMES",
    "TRAININGS",
    "Learned",
    "Timed",
    "Trained",
    "lab",
    "large_curve",
    "learned",
    "spent_in_lab",
    "steps_to",
]

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
_SIZE = "layers=6, heads=6, width=384"
LARGE_TASK, PACED = (
    f"benchmarks.workloads.news:NewsgroupsGPT({_SIZE})",
    f"benchmarks.peers.paced:Paced({_SIZE})",
)
LARGE_PROCESSOR_S = 5000
"""Of a training of 43 MB, by all its replicas."""
LARGE_RATE = 0.001
"""Of all systems at 43 MB, after a warm-up of 100 steps."""
LARGE_STEPS = {"DDP, 43 MB": 1000, "streaming_diloco, 8 steps late, 43 MB": 2100}
"""Of the reference, and of what comes to its loss after more than the 2,000 steps of all others."""


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
        """Steps, accuracies in percent and losses; of trainings stored on 2026-11-27, no losses.

        Steps, losses and bytes where it is in virtual time.
        """
        if recipe := system_of(self.name).recipe:
            return [[*point] for point in self._language(recipe).train()]
        said = torchrun(nodes, "benchmarks.peers.worker", json.dumps(vars(self)))
        looks: list[list[float]] = next(one["looks"] for one in said if one["rank"] == 0)
        return looks

    def _language(self, recipe: str) -> Language:
        return Language(
            recipe,
            self.rate,
            steps=self.steps,
            seed=self.seed,
            workload=self.task,
            learning_rate_schedule="constant(warmup=100)",
        )


@dataclass(frozen=True)
class Timed:
    """Steps of a large model in the lab, at a device's pace.

    Args:
      name: of the system.
      network: between the replicas.
    """

    name: str
    network: str

    @property
    def title(self) -> str:
        """For a line of progress."""
        return f"{self.name}, on {self.network}"

    def train(self) -> dict[str, Any]:
        """What steps take: those until they are alike, and as many after.

        Raises:
          LabError: other programs hold up steps that exchange nothing.
        """
        system = LARGE[self.name]
        system.check(self.name)
        steps = 2 * system.until
        found = spent_in_lab(
            Trained(self.name, 1e-4, PILOT, steps, every=0, batch=1, task=PACED), self.network
        )
        if self.name == NO_EXCHANGE and found["seconds"][1] > 1.5 * STEP_S:
            raise LabError(
                f"a step of {STEP_S:g} s without an exchange takes {found['seconds'][1]:.2f} s: the processors are "
                "busy, so that no time of an exchange would count"
            )
        return found


def lab(training: Trained, network: str) -> list[dict[str, Any]]:
    """What each rank said of a training there."""
    said = in_lab(find_network(network), NODES, "benchmarks.peers.worker", json.dumps(vars(training)))
    return [line for (line,) in said]


def spent_in_lab(training: Trained, network: str) -> dict[str, Any]:
    """What steps take in all until they are alike, and each after that."""
    ranks, until = lab(training, network), system_of(training.name).until
    found: dict[str, Any] = {"until": until}
    for what in ("seconds", "sent", "processor_s"):
        # All ranks take as long but for hivemind's, of which one may wait for the others at the end.
        over_ranks = statistics.median if what == "seconds" else math.fsum
        begin, alike, end = (over_ranks(one["marks"][at][what] for one in ranks) for at in range(3))
        found[what] = [alike - begin, (end - alike) / (training.steps - until)]
    return {**found, "peak_mb": max(one["peak_mb"] for one in ranks)}


def _canaries(training: Trained | Timed) -> Sequence[str]:
    return system_of(training.name).canaries


TRAININGS: Trainings[Trained, list[list[float]]] = Trainings(
    Path(__file__).parent / "results" / "trainings.jsonl", Trained, _canaries
)
TIMES: Trainings[Timed, dict[str, Any]] = Trainings(
    Path(__file__).parent / "results" / "times.jsonl", Timed, _canaries, TRAININGS.used
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


def large_curve(name: str) -> list[list[float]]:
    """Steps, losses and bytes of a system at 43 MB; trained now unless it is stored."""
    if LARGE[name].steps_of:
        return large_curve(LARGE[name].steps_of)
    steps = LARGE_STEPS.get(name, 2000)
    return TRAININGS.curve(
        Trained(name, LARGE_RATE, PILOT, steps, every=steps // EVALUATIONS, batch=3, task=LARGE_TASK)
    )


def steps_to(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """Steps after which a loss is reached, linearly between evaluations; ``None``: never."""
    for (before, higher, *_), (after, lower, *_) in pairwise(curve):
        if lower <= loss:
            return before + (after - before) * (higher - loss) / (higher - lower)
    return None


def main(names: Sequence[str]) -> int:
    """Makes all trainings of systems, after an estimate; the exit code."""
    each = (len(RATES["SGD"]) * PILOT_STEPS + len(JUDGES) * STEPS) / STEPS
    seconds = sum(LARGE_PROCESSOR_S if name in LARGE else each * PROCESSOR_S for name in names)
    print(f"about {seconds:,.0f} processor seconds, without what is stored", file=sys.stderr)

    def make(name: str, system: System) -> Any:
        if name in LARGE:
            return large_curve(name)
        system.check(name)
        return learned(name)

    return in_turn("system", names, SYSTEMS | LARGE, make)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
