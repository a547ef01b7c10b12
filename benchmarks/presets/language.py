"""Trainings of a small transformer: its loss on text that it has not seen, and the bytes sent until then."""

from __future__ import annotations

import math
import re
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

import torch

from benchmarks.common import Trainings
from benchmarks.presets.methods import Setting
from farflung.runs import simulate

__all__ = ["CORPUS", "DEVICE", "NODES", "TRAININGS", "Curve", "Language", "canaries"]

Curve: TypeAlias = list[tuple[int, float, int]]
"""Steps; loss after them; bytes that rank 0 had sent in exchanges of the training."""
NODES, DEVICE = 4, "cpu-core"
COMPUTE_ON = "cuda:0" if torch.cuda.is_available() else "cpu"
CORPUS = "benchmarks.workloads.news:NewsgroupsGPT"
EVALUATIONS = 20
RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Language:
    """One training.

    Args:
      recipe: how to train together.
      learning_rate: the highest, after the warm-up.
      optimizer: the workload's when not given.
      steps: updates.
      seed: of everything.
      workload: its name.
      learning_rate_schedule: the workload's when not given.
    """

    recipe: str
    learning_rate: float
    optimizer: str = ""
    steps: int = 10_000
    seed: int = 0
    workload: str = CORPUS
    learning_rate_schedule: str = ""

    @classmethod
    def of(cls, setting: Setting, steps: int, seed: int, workload: str = CORPUS) -> Language:
        """Return the training of a point of a grid."""
        return cls(**vars(setting), steps=steps, seed=seed, workload=workload)

    @property
    def title(self) -> str:
        """What differs between them."""
        return f"{self.recipe}, rate {self.learning_rate:g}, {self.steps:,} steps, seed {self.seed}"

    def quickly(self) -> Language:
        """The same, of something small, until every recipe has sent something."""
        return replace(self, steps=60, workload="synthetic/quadratic", optimizer="")

    def train(self) -> Curve:
        """Return the curve, of the mean of the replicas where they differ; a training that was cut off goes on."""
        name = re.sub(
            r"[^a-z0-9.]+", "-", f"{self.title} {self.workload} {self.learning_rate_schedule}".lower().strip()
        )
        folder = RESULTS / "parts" / name
        cut_off = any((folder / "checkpoints").glob("step-*"))
        if not cut_off:
            shutil.rmtree(folder, ignore_errors=True)
        every = max(1, self.steps // EVALUATIONS)
        if cut_off:
            run = simulate(resume=folder, compute_on=COMPUTE_ON)
        else:
            run = simulate(
                self.workload, self.recipe, out=folder, compute_on=COMPUTE_ON, **self._settings(every)
            )
        curve: dict[int, tuple[int, float, int]] = {}
        for event in run.events[0]:
            told: dict[str, Any] = dict(event)
            if told["event"] == "evaluation":
                loss = told["loss"] if math.isfinite(told["loss"]) else math.inf
                curve[told["step"]] = told["step"], loss, told["bytes_sent"]
        shutil.rmtree(folder)
        return list(curve.values())

    def _settings(self, every: int) -> dict[str, Any]:
        return {
            "workers": NODES,
            "network": "lan-1g",
            "device": DEVICE,
            "steps": self.steps,
            "learning_rate": self.learning_rate,
            **{
                name: text
                for name in ("optimizer", "learning_rate_schedule")
                if (text := getattr(self, name))
            },
            "evaluate_every": every,
            "checkpoint_every": every,
            "on_nonfinite": "skip",
            "seed": self.seed,
        }


def canaries(text: str) -> tuple[str, ...]:
    """The cases of the battery that cover a recipe."""
    return (f"preset {text.partition('(')[0]}",)


TRAININGS: Trainings[Language, Curve] = Trainings(
    RESULTS / "trainings.jsonl", Language, lambda training: canaries(training.recipe)
)
