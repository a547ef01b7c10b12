"""The estimators against scikit-learn's own, and by its conventions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from farflung import coded
from farflung.coded.run import Learner
from farflung.coded.solvers import GD, LBFGS
from farflung.data import a9a
from farflung.data.source import find
from farflung.errors import BadInput, BadLabels, ConfigError
from tests.coded.problems import cancer, wine

pytest.importorskip("sklearn")

from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import parametrize_with_checks

from farflung.coded.estimators import CodedClassifier, CodedLinearSVC, CodedLogisticRegression


@parametrize_with_checks(  # type: ignore[untyped-decorator]
    [CodedLogisticRegression(), CodedLinearSVC()]
)
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_conventions(estimator: CodedClassifier, check: Callable[[CodedClassifier], None]) -> None:
    check(estimator)


PAIRS: dict[str, tuple[CodedClassifier, Any]] = {
    "logistic": (CodedLogisticRegression(), LogisticRegression(solver="newton-cholesky", tol=1e-10)),
    "logistic, no intercept": (
        CodedLogisticRegression(C=0.1, fit_intercept=False),
        LogisticRegression(C=0.1, fit_intercept=False, solver="newton-cholesky", tol=1e-10),
    ),
    "logistic, gd": (
        CodedLogisticRegression(C=0.01, solver="gd", tol=1e-12, max_iter=5000),
        LogisticRegression(C=0.01, solver="newton-cholesky", tol=1e-10),
    ),
    "squared hinge": (CodedLinearSVC(), LinearSVC(dual=False, tol=1e-10, max_iter=10**5)),
    "squared hinge, scaled": (
        CodedLinearSVC(intercept_scaling=4.0, C=0.1),
        LinearSVC(dual=False, intercept_scaling=4.0, C=0.1, tol=1e-10, max_iter=10**5),
    ),
    "hinge": (
        CodedLinearSVC(loss="hinge"),
        LinearSVC(loss="hinge", dual=True, tol=1e-9, max_iter=10**7, random_state=0),
    ),
}


@pytest.mark.parametrize("data", [cancer, wine])
@pytest.mark.parametrize("name", PAIRS)
def test_as_scikit_learn(name: str, data: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
    rows, codes = (part.numpy() for part in data())
    labels = np.array(["one", "two", "three"])[codes]
    mine, theirs = (model.fit(rows, labels) for model in PAIRS[name])
    assert mine.classes_.tolist() == theirs.classes_.tolist()
    assert mine.n_features_in_ == rows.shape[1]
    atol = 1e-2 if name == "hinge" else 5e-4  # its kink is a parabola of that width
    np.testing.assert_allclose(mine.coef_, theirs.coef_, atol=atol)
    np.testing.assert_allclose(mine.intercept_, theirs.intercept_, atol=atol)
    np.testing.assert_allclose(mine.decision_function(rows), theirs.decision_function(rows), atol=10 * atol)
    assert (mine.predict(rows) == theirs.predict(rows)).all()
    assert mine.score(rows, labels) == theirs.score(rows, labels)
    if hasattr(theirs, "predict_proba"):
        np.testing.assert_allclose(mine.predict_proba(rows), theirs.predict_proba(rows), atol=1e-3)
        np.testing.assert_allclose(mine.predict_proba(rows).sum(axis=1), 1)
        np.testing.assert_allclose(np.exp(mine.predict_log_proba(rows)), mine.predict_proba(rows), rtol=1e-12)


@pytest.mark.parametrize("kind", [sparse.csr_matrix, sparse.csc_array, sparse.coo_array])
def test_sparse_samples(kind: Callable[[Any], Any]) -> None:
    rows = np.random.default_rng(0).integers(0, 2, (9000, 7)).astype(np.float64)
    labels = rows[:, 0] + rows[:, 1] > rows[:, 2]
    dense, thin = CodedLinearSVC().fit(rows, labels), CodedLinearSVC().fit(kind(rows), labels)
    np.testing.assert_array_equal(dense.coef_, thin.coef_)
    np.testing.assert_allclose(dense.decision_function(rows), thin.decision_function(kind(rows)), atol=1e-12)


def test_too_few_iterations_are_told() -> None:
    rows, codes = (part.numpy() for part in cancer())
    with pytest.warns(ConvergenceWarning, match="CodedLogisticRegression did not converge in 3 iterations"):
        model = CodedLogisticRegression(max_iter=3).fit(rows, codes)
    assert model.n_iter_ == 3
    assert model.score(rows, codes) > 0.9


def test_one_class_is_bad_input_and_a_value_error() -> None:
    with pytest.raises(BadLabels, match="CodedLinearSVC needs samples of at least 2 classes") as caught:
        CodedLinearSVC().fit(np.eye(3), np.ones(3))
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, BadInput)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (CodedLogisticRegression(C=-1), "C -1 must be"),
        (CodedLogisticRegression(devices=0), "devices = 0: must be 1 or more"),
        (CodedLinearSVC(solver="newton"), "unknown solver 'newton'; known: gd, lbfgs"),
        (CodedLinearSVC(loss="log"), "unknown loss 'log'; known: hinge, squared_hinge"),
    ],
)
def test_parameters_that_do_not_fit_are_value_errors(model: CodedClassifier, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        model.fit(np.eye(3), [0, 1, 1])
    assert isinstance(caught.value, ConfigError)


def test_the_solver_of_0_1_for_the_hinge_warns() -> None:
    rows, codes = (part.numpy() for part in cancer())
    with pytest.warns(FutureWarning, match="solver = 'bundle' is now lbfgs"):
        old = CodedLinearSVC(loss="hinge", solver="bundle").fit(rows, codes)
    np.testing.assert_array_equal(old.coef_, CodedLinearSVC(loss="hinge").fit(rows, codes).coef_)
    with pytest.warns(FutureWarning, match="Bundle is now LBFGS"):
        assert coded.Bundle is LBFGS


def test_the_default_tolerance_is_as_said_and_a_larger_one_is_less_exact() -> None:
    assert "by default 1e-10." in str(CodedLogisticRegression.__doc__)
    assert "by default 1e-10." in str(CodedLinearSVC.__doc__)
    assert "1e-10 when not given" in str(Learner.__doc__)
    assert LBFGS().tol == GD().tol == 1e-10
    rows, codes = (part.numpy() for part in cancer())
    models = [CodedLogisticRegression(tol=tol).fit(rows, codes) for tol in (1e-8, None, 1e-10)]
    assert models[0].objective_ > models[1].objective_ == models[2].objective_


A9A: dict[str, tuple[CodedClassifier, Any, float]] = {
    "logistic": (CodedLogisticRegression(), LogisticRegression(solver="newton-cholesky", tol=1e-7), 1e-6),
    "squared hinge": (CodedLinearSVC(), LinearSVC(dual=False, tol=1e-8, max_iter=10**4), 1e-6),
}


@pytest.mark.parametrize("name", A9A)
def test_a9a(name: str) -> None:
    if find(a9a.SOURCE) is None:
        pytest.skip("a9a is not at hand")
    rows, labels, unseen, answers = whole_a9a()
    mine, theirs, error = A9A[name]
    mine.fit(rows, labels)
    theirs.fit(rows, labels)
    right = labels * theirs.decision_function(rows)
    penalty = 0.5 * (theirs.coef_**2).sum()
    if name == "logistic":
        optimum = penalty + np.logaddexp(0, -right).sum()
    else:
        optimum = penalty + 0.5 * float(theirs.intercept_[0]) ** 2 + (np.maximum(0, 1 - right) ** 2).sum()
    assert abs(mine.objective_ / optimum - 1) < error
    assert (mine.predict(unseen) == theirs.predict(unseen)).mean() >= 0.999
    assert mine.score(unseen, answers) > 0.849
    assert mine.n_iter_ < 150


def test_hinge_on_a9a() -> None:
    """With a parabola in place of the kink, so near the optimum and not at it."""
    if find(a9a.SOURCE) is None:
        pytest.skip("a9a is not at hand")
    rows, labels, unseen, answers = whole_a9a()
    model = CodedLinearSVC(loss="hinge").fit(rows, labels)
    short = np.maximum(0, 1 - labels * model.decision_function(rows)).sum()
    objective = 0.5 * (model.coef_**2).sum() + 0.5 * float(model.intercept_[0]) ** 2 + short
    assert objective <= model.objective_ < objective * (1 + 1e-4)
    assert objective < 11433.7007 * (1 + 2e-5)  # the optimum, to a gap of 1e-7
    assert model.n_iter_ < 300
    assert model.score(unseen, answers) > 0.848
    theirs = LinearSVC(loss="hinge", dual=True, tol=1e-6, max_iter=10**5, random_state=0).fit(rows, labels)
    assert (model.predict(unseen) == theirs.predict(unseen)).mean() >= 0.999


def whole_a9a() -> tuple[Any, Any, Any, Any]:
    sets = a9a.load()
    parts = [data.take(torch.arange(len(data)), train=False) for data in sets]
    return tuple(part.numpy() for batch in parts for part in (batch.inputs, batch.targets))  # type: ignore[return-value]
