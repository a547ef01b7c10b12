"""Whole trainings of every recipe on seeds that no plan has seen: the truth that plans are judged by."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TypeAlias

import torch

from benchmarks.common import Trainings
from farflung.planning.choice import find_crossing
from farflung.planning.pilots import slice_test_set
from farflung.runs import SimulatedConfig, simulate
from farflung.types import Workload

__all__ = ["JUDGED", "NODES", "TASKS", "TRAININGS", "Curve", "Task", "Whole", "steps_to"]

Curve: TypeAlias = list[tuple[int, float]]
"""Steps, and the score after them."""
NODES, EVALUATIONS, TEST_STRIDE = 4, 20, 4
"""Replicas; evaluations of a whole training, and the stride of their test samples: they take less than its steps."""
PILOTS, JUDGED = (0, 1), (2, 3)
"""Seeds of plans, and of the trainings that judge them."""
COMPUTE_ON = "cuda:0" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Task:
    """A workload with its training.

    Args:
      workload: its name.
      steps: of a whole training.
      tolerances: below the reference's score at the end.
    """

    workload: str
    steps: int
    tolerances: tuple[float, float, float]


TASKS = {
    "mlp": Task("fashion-mnist/mlp", 600, (0.03, 0.05, 0.08)),
    "covtype": Task("benchmarks.workloads.covtype:mlp", 600, (0.015, 0.03, 0.05)),
    "cnn": Task("fashion-mnist/cnn", 400, (0.03, 0.05, 0.08)),
    "gpt": Task("farflung.workloads.shakespeare:GPT(layers=2, width=64)", 600, (0.012, 0.02, 0.03)),
}
"""The last one with strict targets. No tolerance is below three standard errors of a score on the test samples."""


@cache
def _load_workload(name: str) -> Workload:
    """Returns a workload with a part of its test set, whose samples are read once for all trainings of a process."""
    workload = SimulatedConfig.resolve({"workload": name}).task
    return slice_test_set(workload, math.ceil(len(workload.load_datasets()[1]) / TEST_STRIDE))


@dataclass(frozen=True)
class Whole:
    """One whole training.

    Args:
      workload: its name.
      recipe: with its optimizer and rate, if they are its own.
      steps: of the training.
      seed: of everything.
    """

    workload: str
    recipe: str
    steps: int
    seed: int

    @property
    def title(self) -> str:
        """What differs between them."""
        return f"{self.workload}, {self.recipe}, {self.steps:,} steps, seed {self.seed}"

    def train(self) -> Curve:
        """Return the curve, of the mean of the replicas where they differ."""
        run = simulate(
            _load_workload(self.workload),
            self.recipe,
            compute_on=COMPUTE_ON,
            workers=NODES,
            network="loopback",
            steps=self.steps,
            seed=self.seed,
            evaluate_every=self.steps // EVALUATIONS,
            checkpoint_every=0,
            on_nonfinite="skip",
        )
        events = [event for event in run.events[0] if event["event"] == "evaluation"]
        return [(int(str(event["step"])), float(str(event["accuracy"]))) for event in events]


def canaries(training: Whole) -> tuple[str, ...]:
    """The cases of the battery that cover a training."""
    return (f"preset {training.recipe.partition('(')[0]}",)


TRAININGS: Trainings[Whole, Curve] = Trainings(
    Path(__file__).parent / "results" / "trainings.jsonl", partial(Whole), canaries
)


def steps_to(curve: Curve, level: float) -> float:
    """Return the step at which the median of three evaluations reaches a level; infinite if it does not."""
    smooth = [
        (step, statistics.median(score for _, score in curve[max(0, i - 1) : i + 2]))
        for i, (step, _) in enumerate(curve)
    ]
    crossing = find_crossing(smooth, level)
    return math.inf if crossing is None else crossing


def curves_of(task: Task, recipes: Sequence[str]) -> Mapping[str, list[Curve]]:
    """Return the curves of the judging seeds, stored or trained now."""
    return {
        recipe: [TRAININGS.curve(Whole(task.workload, recipe, task.steps, seed)) for seed in JUDGED]
        for recipe in recipes
    }
