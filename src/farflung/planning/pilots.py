"""Pilots of a plan: short trainings with the arithmetic, whose final model scores each test sample."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any, cast

import torch
from torch import Tensor

from farflung.data import Subset
from farflung.errors import Unsupported
from farflung.planning.choice import NUM_TENTHS, Pilot
from farflung.planning.timing import scale_recipe
from farflung.runs import PreparedRun, RunFolder, SimulatedConfig, simulate_prepared
from farflung.runs.folder import TempFolder
from farflung.runs.simulation import limit_to_one_thread
from farflung.seeding import RandomState, create_generator, derive_seed
from farflung.telemetry import Event, read_number
from farflung.types import Dataset, Json, Workload

__all__ = ["slice_test_set", "train_pilot"]

NUM_EVALUATIONS = 10
CURVE_SAMPLES, FINAL_SAMPLES = 500, 10_000
"""Largest numbers of test samples of an evaluation during a pilot, and at its end."""
BATCH_SIZE = 256
WORST_SCORE = -1e6
"""Score in place of lower ones, and of those that are not numbers."""


def train_pilot(config: SimulatedConfig, steps: int, seed: int) -> Pilot:
    """Trains a pilot of ``steps`` steps, all schedules as much shorter, in virtual time.

    Raises:
      Unsupported: The metric is no mean over test samples.
    """
    scaled = scale_recipe(config, steps)
    evaluate_every = max(1, steps // NUM_EVALUATIONS)
    training = replace(
        scaled.training, seed=seed, evaluate_every=evaluate_every, checkpoint_every=0, on_nonfinite="skip"
    )
    task = slice_test_set(config.task, CURVE_SAMPLES)
    folder, begin_s = TempFolder(), time.process_time()
    pilot = replace(scaled, training=training, task=task, network="loopback")
    run = simulate_prepared(PreparedRun(pilot, RunFolder(folder.path / "run")), should_checkpoint=False)
    curve = [
        (int(read_number(event, "step")), _limit_score(event["accuracy"]))
        for event in run.events[0]
        if event["event"] == "evaluation"
    ]
    scores = _score_samples(config.task, run.state_dict(), seed)
    return Pilot(steps, curve, scores, _bound_losses(run.events[0], steps), time.process_time() - begin_s)


def _bound_losses(events: Sequence[Event], steps: int) -> list[float | None]:
    """Returns the mean loss of each tenth of the steps and twice its standard deviation; ``None`` without losses."""
    tenths: list[list[float]] = [[] for _ in range(NUM_TENTHS)]
    for event in events:
        loss = event.get("mean_loss") if event["event"] == "step" else None
        if isinstance(loss, int | float) and math.isfinite(loss):
            tenths[int(read_number(event, "step")) * NUM_TENTHS // steps].append(loss)
    return [fmean(tenth) + 2 * pstdev(tenth) if tenth else None for tenth in tenths]


def slice_test_set(workload: Workload, max_samples: int) -> Workload:
    """Returns a workload with evenly spaced test samples, at most ``max_samples``."""
    return cast(Workload, _SlicedWorkload(workload, max_samples))


class _SlicedWorkload:
    """Workload with a part of the test set."""

    def __init__(self, workload: Workload, max_samples: int) -> None:
        self._workload, self._max_samples = workload, max_samples

    def __getattr__(self, name: str) -> Any:
        return getattr(self._workload, name)

    def load_datasets(self) -> tuple[Dataset, Dataset]:
        train, test = self._workload.load_datasets()
        return train, Subset(test, _select_ids(len(test), self._max_samples))


def _select_ids(size: int, count: int) -> Tensor:
    """Selects evenly spaced samples, at most ``count``."""
    return torch.arange(0, size, -(-size // count))


def _score_samples(task: Workload, state: dict[str, Tensor], seed: int) -> list[float]:
    """Returns the score of each test sample by a trained model."""
    model, (_, test) = task.build_model(create_generator(seed, "model")), task.load_datasets()
    model.load_state_dict(state)
    model.eval()
    with RandomState.preserve_globals(), limit_to_one_thread(), torch.no_grad():
        RandomState.from_workload(task, derive_seed(seed, "evaluation"), torch.device("cpu")).install()
        scores = torch.cat(
            [
                task.compute_metrics(model, test.take(ids, train=False))
                for ids in _select_ids(len(test), FINAL_SAMPLES).split(BATCH_SIZE)
            ]
        )
    if scores.dim() > 1:
        raise Unsupported(f"{task.name}: its metric is no mean over samples, so pilots cannot be compared")
    finite = scores.nan_to_num(nan=WORST_SCORE).clamp(min=WORST_SCORE)
    return [round(score, 6) for score in finite.tolist()]


def _limit_score(score: Json) -> float:
    """Returns a score that is finite, even of a model that has diverged."""
    return score if isinstance(score, int | float) and score > WORST_SCORE else WORST_SCORE
