"""Whole trainings of every recipe on seeds that no plan has seen: the truth that plans are judged by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeAlias

import torch

from benchmarks.common import Trainings
from farflung.planning.choice import find_crossing
from farflung.runs import simulate

__all__ = ["JUDGED", "NODES", "TASKS", "TRAININGS", "Curve", "Task", "Whole", "steps_to"]

Curve: TypeAlias = list[tuple[int, float]]
"""Steps, and the score after them."""
NODES, EVALUATIONS = 4, 40
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
    "mlp": Task("fashion-mnist/mlp", 800, (0.03, 0.05, 0.08)),
    "cnn": Task("fashion-mnist/cnn", 800, (0.03, 0.05, 0.08)),
    "resnet8": Task("cifar10/resnet8", 2_000, (0.03, 0.05, 0.08)),
    "gpt": Task("benchmarks.workloads.news:NewsgroupsGPT", 6_000, (0.05, 0.15, 0.35)),
}
"""The last one with strict targets, which few recipes reach."""


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
            self.workload,
            self.recipe,
            compute_on=COMPUTE_ON,
            workers=NODES,
            network="loopback",
            steps=self.steps,
            seed=self.seed,
            evaluate_every=max(1, self.steps // EVALUATIONS),
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


def steps_to(curves: Sequence[Curve], level: float) -> list[float] | None:
    """Return the steps of each seed to a level, by the median of three evaluations; ``None`` if one misses it."""
    found = []
    for curve in curves:
        smooth = [
            (
                step,
                sorted(score for _, score in curve[max(0, i - 1) : i + 2])[
                    len(curve[max(0, i - 1) : i + 2]) // 2
                ],
            )
            for i, (step, _) in enumerate(curve)
        ]
        crossing = find_crossing(smooth, level)
        if crossing is None:
            return None
        found.append(crossing)
    return found


def curves_of(task: Task, recipes: Sequence[str]) -> Mapping[str, list[Curve]]:
    """Return the curves of the judging seeds, stored or trained now."""
    return {
        recipe: [TRAININGS.curve(Whole(task.workload, recipe, task.steps, seed)) for seed in JUDGED]
        for recipe in recipes
    }
