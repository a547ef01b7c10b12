"""Objectives and accuracies of the estimators beside scikit-learn's."""

from __future__ import annotations

import time
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import Measured
from farflung.data import a9a, covtype

__all__ = ["accuracy", "hinge", "smooth"]

COVTYPE_CLASS, MEASURED_COLUMNS = 1, 10
"""Lodgepole pine, the second of seven classes, and how many columns are measured."""
SCIKIT_TOL = 1e-10
LIBLINEAR_HINGE_ITERATIONS = 200_000
QUICK_ROWS = 2_000
Numbers = NDArray[np.float64]


def samples(name: str, quick: bool) -> tuple[Numbers, Numbers]:
    """The training set, in float64, with targets of -1 and 1; the measured columns of covtype standardised."""
    if name == "a9a":
        train, _ = a9a.load()
        rows, targets = train.inputs.to(torch.float64), train.targets.to(torch.float64)
    else:
        train, _ = covtype.load()
        rows = train.inputs.to(torch.float64)
        measured = rows[:, :MEASURED_COLUMNS]
        rows[:, :MEASURED_COLUMNS] = (measured - measured.mean(0)) / measured.std(0, correction=0)
        targets = torch.where(train.targets == COVTYPE_CLASS, 1.0, -1.0).to(torch.float64)
    most = QUICK_ROWS if quick else len(rows)
    return rows[:most].numpy(), targets[:most].numpy()


def objective(model: Any, rows: Numbers, targets: Numbers, loss: str) -> float:
    """What both minimise, at a model's weights, computed alike for both: C = 1."""
    weights, intercept = model.coef_[0], float(np.ravel(model.intercept_)[0])
    margins = targets * (rows @ weights + intercept)
    penalty = 0.5 * float(weights @ weights)
    if loss == "logistic":
        return penalty + float(np.logaddexp(0, -margins).sum())
    short = np.maximum(0, 1 - margins)
    return penalty + 0.5 * intercept**2 + float((short if loss == "hinge" else short**2).sum())


def fitted(model: Any, rows: Numbers, targets: Numbers, loss: str) -> dict[str, Any]:
    """Fits; the objective, and what it took."""
    begin = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model.fit(rows, targets)
    seconds = time.perf_counter() - begin
    return {
        "objective": objective(model, rows, targets, loss),
        "iterations": int(np.max(model.n_iter_)),
        "converged": not caught,
        "seconds": round(seconds, 2),
    }


def smooth(quick: bool) -> Mapping[str, Measured]:
    """Logistic regression and the squared hinge on both data sets; the largest of the four errors counts."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.svm import LinearSVC

    from farflung.coded.estimators import CodedLinearSVC, CodedLogisticRegression

    torch.set_num_threads(1)
    config: dict[str, Any] = {"C": 1.0, "scikit_tol": SCIKIT_TOL, "ours_tol": "default"}
    errors = {}
    for name in ("a9a", "covtype"):
        rows, targets = samples(name, quick)
        for loss, ours, theirs in (
            (
                "logistic",
                CodedLogisticRegression(),
                LogisticRegression(solver="newton-cholesky", tol=SCIKIT_TOL),
            ),
            ("squared hinge", CodedLinearSVC(), LinearSVC(dual=False, tol=SCIKIT_TOL)),
        ):
            mine, due = fitted(ours, rows, targets, loss), fitted(theirs, rows, targets, loss)
            errors[f"{loss}, {name}"] = mine["objective"] / due["objective"] - 1
            config[f"{loss}, {name}"] = {"ours": mine, "scikit-learn": due}
    config["relative_errors"] = errors
    sizes = sorted(map(abs, errors.values()))
    row = "objective against scikit-learn, logistic and squared hinge, a9a and covtype"
    return {row: Measured(sizes[-1], (sizes[0], sizes[-1]), config)}


def hinge(quick: bool) -> Mapping[str, Measured]:
    """The hinge against liblinear on a9a; on covtype liblinear does not converge."""
    from sklearn.svm import LinearSVC

    from farflung.coded.estimators import CodedLinearSVC

    torch.set_num_threads(1)
    rows, targets = samples("a9a", quick)
    ours = CodedLinearSVC(loss="hinge")
    theirs = LinearSVC(loss="hinge", dual=True, tol=1e-8, max_iter=LIBLINEAR_HINGE_ITERATIONS, random_state=0)
    mine, due = fitted(ours, rows, targets, "hinge"), fitted(theirs, rows, targets, "hinge")
    held = a9a.load()[1].inputs.to(torch.float64).numpy()
    config: dict[str, Any] = {
        "C": 1.0,
        "liblinear_iterations": LIBLINEAR_HINGE_ITERATIONS,
        "a9a": {"ours": mine, "scikit-learn": due},
        "same_predictions": 100 * float((ours.predict(held) == theirs.predict(held)).mean()),
    }
    error = abs(mine["objective"] / due["objective"] - 1)
    return {"objective against scikit-learn, hinge": Measured(error, (error, error), config)}


def accuracy(quick: bool) -> Mapping[str, Measured]:
    """Of logistic regression on the test set of a9a."""
    from sklearn.linear_model import LogisticRegression

    from farflung.coded.estimators import CodedLogisticRegression

    torch.set_num_threads(1)
    rows, targets = samples("a9a", quick)
    _, test = a9a.load()
    held, labels = test.inputs.to(torch.float64).numpy(), test.targets.to(torch.float64).numpy()
    ours = CodedLogisticRegression().fit(rows, targets)
    theirs = LogisticRegression(solver="newton-cholesky", tol=SCIKIT_TOL).fit(rows, targets)
    found = 100 * float(ours.score(held, labels))
    config = {
        "C": 1.0,
        "test_samples": len(labels),
        "scikit_learn": 100 * float(theirs.score(held, labels)),
        "same_predictions": 100 * float((ours.predict(held) == theirs.predict(held)).mean()),
    }
    return {"a9a test accuracy, logistic regression": Measured(found, (found, found), config)}
