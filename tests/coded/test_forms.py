"""An estimator fits in one process what coordinator and devices train as processes of their own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from farflung.coded import LBFGS, Hinge, Logistic, Objective, Solver
from farflung.coded.parts import partitioned
from farflung.coded.run import Trained, train
from farflung.types import Json
from tests.coded.problems import cancer, signs
from tests.coded_processes import Crowd, Told, run_on_loopback
from tests.helpers import PATIENCE_S

pytest.importorskip("sklearn")

from farflung.coded.estimators import CodedClassifier, CodedLinearSVC, CodedLogisticRegression

PARTITIONS = 4
EXACT = 1e-9


def part_of_cancer(number: int) -> tuple[Tensor, Tensor]:
    """What the device of a partition has: the rows that the estimator gives it."""
    features, classes = cancer()
    rows = partitioned(len(features), PARTITIONS)[number]
    return features[rows].clone(), classes[rows].to(torch.float64)


def distributed(estimator: CodedClassifier, objective: Objective, solver: Solver[Any], folder: Path) -> Any:
    """Weights and intercept, trained by processes that come one after the other."""
    settings = replace(
        estimator._settings(len(cancer()[0])),
        least_s=PATIENCE_S,  # on a busy machine nobody counts as silent, whose blocks others would make
    )
    notes = Told()
    with run_on_loopback(settings, notes) as (runtime, coordinator, at):
        crowd = Crowd(at, folder, data=part_of_cancer)

        def hears(event: str, values: dict[str, Json]) -> None:
            del values
            place = len(crowd.forks)
            if event == "came" and place < settings.devices:
                crowd.join(place if place < PARTITIONS else None)

        async def body() -> Trained:
            return await train(
                coordinator,
                objective,
                solver,
                lambda labels: signs(labels.to(torch.int64)),
                max_iterations=estimator.max_iter,
            )

        notes.listener = hears
        try:
            crowd.join(0)
            trained = runtime.drive(body())
            crowd.left()
        finally:
            crowd.close()
    return trained.iterate.weights[:, 0].numpy()


MODELS: dict[str, tuple[type[CodedClassifier], dict[str, Any], Objective, Solver[Any]]] = {
    "logistic": (CodedLogisticRegression, {}, Logistic(), LBFGS()),
    "hinge": (CodedLinearSVC, {"loss": "hinge"}, Hinge(), LBFGS()),
}


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "devices"),
    [
        ("hinge", PARTITIONS),
        ("logistic", PARTITIONS + 2),
    ],
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_both_forms_give_the_same_coefficients(name: str, devices: int, tmp_path: Path) -> None:
    """But for rounding: where a message lies in memory changes the last bits of a product, and by which blocks a coded
    answer is decoded depends on who is fast.
    """
    kind, options, objective, solver = MODELS[name]
    features, classes = (one.numpy() for one in cancer())
    local = kind(devices=devices, partitions=PARTITIONS, **options).fit(features, classes)
    found = distributed(local, objective, solver, tmp_path)
    due = np.concatenate([local.coef_[0], local.intercept_])
    np.testing.assert_allclose(found, due, rtol=0, atol=EXACT * np.abs(due).max())
