"""The estimators against scikit-learn's own, and by its conventions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from farflung.coded.run import Learner
from farflung.coded.solvers import GD, LBFGS
from farflung.errors import BadInput, BadLabels, BadSamples, ConfigError
from tests.coded.problems import cancer, wine

pytest.importorskip("sklearn")

from scipy import sparse
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import parametrize_with_checks

from farflung.coded.estimators import CodedClassifier, CodedLinearSVC, CodedLogisticRegression
from tests.covering import thorough


@parametrize_with_checks([CodedLogisticRegression(devices=2)])  # type: ignore[untyped-decorator]
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_conventions(estimator: CodedClassifier, check: Any) -> None:
    if "sample_weight_equivalence" in check.func.__name__:
        estimator.set_params(
            tol=1e-18
        )  # coefficients are compared to 1e-7, as scikit-learn's with such a tol
    check(estimator)


@pytest.mark.thorough
@parametrize_with_checks([CodedLinearSVC(devices=2)])  # type: ignore[untyped-decorator]
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_conventions_of_the_other(estimator: CodedClassifier, check: Any) -> None:
    test_conventions(estimator, check)


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


@pytest.mark.parametrize("data", [cancer, *thorough(wine)])
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


def test_sparse_samples() -> None:
    rows = np.random.default_rng(0).integers(0, 2, (9000, 7)).astype(np.float64)
    labels = rows[:, 0] + rows[:, 1] > rows[:, 2]
    dense = CodedLinearSVC().fit(rows, labels)
    for kind in (sparse.csr_matrix, sparse.coo_array):
        thin = CodedLinearSVC().fit(kind(rows), labels)
        np.testing.assert_array_equal(dense.coef_, thin.coef_)
        decided = thin.decision_function(kind(rows))
        np.testing.assert_allclose(dense.decision_function(rows), decided, atol=1e-12)


def test_too_few_iterations_are_told() -> None:
    rows, codes = (part.numpy() for part in cancer())
    with pytest.warns(ConvergenceWarning, match="CodedLogisticRegression did not converge in 3 iterations"):
        model = CodedLogisticRegression(max_iter=3).fit(rows, codes)
    assert model.n_iter_.tolist() == [3]
    assert model.n_iter_.dtype == np.int32
    assert model.score(rows, codes) > 0.9


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        (CodedLogisticRegression(C=-1), ConfigError, "C -1 must be"),
        (CodedLogisticRegression(devices=0), ConfigError, "devices 0 must be at least"),
        (CodedLinearSVC(solver="newton"), ConfigError, "unknown solver 'newton'; known: gd, lbfgs"),
        (CodedLinearSVC(loss="log"), ConfigError, "unknown loss 'log'; known: hinge, squared_hinge"),
        (CodedLinearSVC(), BadLabels, "CodedLinearSVC needs samples of at least 2 classes"),
    ],
)
def test_what_does_not_fit_is_a_value_error(
    model: CodedClassifier, kind: type[Exception], message: str
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        model.fit(np.eye(3), [0, 1, 1] if kind is ConfigError else np.ones(3))
    assert isinstance(caught.value, kind)
    assert isinstance(caught.value, BadInput)


def test_the_default_tolerance_is_as_said_and_a_larger_one_is_less_exact() -> None:
    for estimator in (CodedLogisticRegression, CodedLinearSVC):
        assert "1e-10 by default." in " ".join(str(estimator.__doc__).split())
    assert "1e-10 when not given" in str(Learner.__doc__)
    assert LBFGS().tol == GD().tol == 1e-10
    rows, codes = (part.numpy() for part in cancer())
    models = [CodedLogisticRegression(tol=tol).fit(rows, codes) for tol in (1e-8, None, 1e-10)]
    assert models[0].objective_ > models[1].objective_ == models[2].objective_


# --- columns far from 0, and of unlike sizes --------------------------------------------------------------------------


def mixed(seed: int = 0) -> tuple[Any, Any]:
    """400 samples of 12 standard normal columns, and labels that follow from them in part."""
    random = np.random.default_rng(seed)
    rows = random.standard_normal((400, 12))
    return rows, (rows[:, :4].sum(axis=1) + 2 * random.standard_normal(400) > 0).astype(int)


def objective_of(model: Any, rows: Any, labels: Any) -> float:
    """What a model of two classes minimises, from its definition."""
    right = np.where(labels == model.classes_[1], 1, -1) * (rows @ model.coef_[0] + model.intercept_[0])
    penalty = 0.5 * (model.coef_**2).sum()
    if isinstance(model, CodedLogisticRegression | LogisticRegression):
        return float(penalty + model.C * np.logaddexp(0, -right).sum())
    penalty += 0.5 * (model.intercept_[0] / model.intercept_scaling) ** 2
    return float(penalty + model.C * (np.maximum(0, 1 - right) ** 2).sum())


@pytest.mark.parametrize(("offset", "width"), [(1e3, "one"), (1e6, "all")])
def test_logistic_regression_of_columns_far_from_0(offset: float, width: str) -> None:
    """The intercept is not penalised, so the coefficients are those of centred columns."""
    rows, labels = mixed()
    far = rows + (offset if width == "all" else offset * np.eye(12)[3])
    near = LogisticRegression(solver="newton-cholesky", tol=1e-12).fit(rows, labels)
    model = CodedLogisticRegression().fit(far, labels)
    np.testing.assert_allclose(model.coef_, near.coef_, atol=1e-5)
    assert model.objective_ == pytest.approx(objective_of(near, rows, labels), rel=1e-9)
    assert (model.predict(far) == near.predict(rows)).all()
    assert model.n_iter_ < 30


@pytest.mark.parametrize("offset", [1e3, *thorough(1e6)])
def test_a_support_vector_machine_of_columns_far_from_0(offset: float) -> None:
    """Its intercept is penalised, so the optimum is another one than that of centred columns."""
    rows, labels = mixed()
    far = rows + offset
    theirs = LinearSVC(dual=False, tol=1e-12, max_iter=10**6).fit(far, labels)
    model = CodedLinearSVC().fit(far, labels)
    assert objective_of(model, far, labels) == pytest.approx(objective_of(theirs, far, labels), rel=1e-7)
    assert (model.predict(far) == theirs.predict(far)).mean() > 0.99
    assert model.n_iter_ < 200


@pytest.mark.filterwarnings(
    "ignore:Line search of Newton solver", "ignore:Liblinear failed", "ignore:.*ill-conditioned"
)
@pytest.mark.parametrize(("kind", "decades"), [(CodedLogisticRegression, 6), (CodedLinearSVC, 3)])
def test_columns_of_unlike_sizes(kind: type[CodedClassifier], decades: int) -> None:
    rows, labels = mixed()
    rows = rows * np.logspace(-decades, decades, 12)
    theirs: Any = LinearSVC(dual=False, tol=1e-12, max_iter=10**6)
    if kind is CodedLogisticRegression:
        theirs = LogisticRegression(solver="newton-cholesky", tol=1e-12, max_iter=1000)
    theirs.fit(rows, labels)
    model = kind().fit(rows, labels)
    least = objective_of(theirs, rows, labels)
    assert objective_of(model, rows, labels) < least * (1 + 1e-9), "theirs is not exact for 6 decades"
    if decades == 3:
        assert objective_of(model, rows, labels) == pytest.approx(least, rel=1e-8)
        np.testing.assert_allclose(model.decision_function(rows), theirs.decision_function(rows), atol=1e-4)


def test_what_rounding_errors_hide_is_told() -> None:
    rows, labels = mixed()
    with pytest.warns(
        ConvergenceWarning, match="rounding errors allow no further one .*: centre and scale the"
    ):
        model = CodedLogisticRegression().fit(rows * 1e14, labels)
    free = CodedLogisticRegression(C=np.inf).fit(rows, labels)
    np.testing.assert_allclose(model.coef_ * 1e14, free.coef_, atol=1e-4)
    with pytest.warns(ConvergenceWarning, match="did not converge in 20 iterations"):
        CodedLogisticRegression(solver="gd", max_iter=20).fit(rows + 1e6, labels)


@pytest.mark.parametrize(
    ("model", "factor"), [(CodedLogisticRegression(), 1e151), (CodedLinearSVC(solver="gd"), 1e300)]
)
def test_features_that_are_too_large_are_a_value_error(model: CodedClassifier, factor: float) -> None:
    rows, labels = mixed()
    for samples in (rows * factor, sparse.csr_matrix(rows * factor)):
        with pytest.raises(ValueError, match=r"X holds numbers above 1e\+150") as caught:
            model.fit(samples, labels)
        assert isinstance(caught.value, BadSamples)


def test_products_that_are_not_finite_are_a_value_error() -> None:
    rows, labels = mixed()
    with pytest.raises(ValueError, match="not finite in float64"):
        CodedLogisticRegression(C=1e20).fit(rows * 1e149, labels)
    with pytest.raises(ValueError, match="a product of the samples is not finite in float64"):
        CodedLinearSVC(solver="gd", learning_rate=1e149, max_iter=3).fit(rows * 1e100, labels)


# --- weights, and what else scikit-learn has --------------------------------------------------------------------------


def counterpart(model: CodedClassifier, **options: Any) -> Any:
    if isinstance(model, CodedLogisticRegression):
        return LogisticRegression(solver="newton-cholesky", tol=1e-12, **options)
    return LinearSVC(dual=False, tol=1e-12, max_iter=10**6, **options)


@pytest.mark.parametrize(
    ("kind", "weighted", "class_weight", "data"),
    [
        (CodedLogisticRegression, True, None, cancer),
        (CodedLogisticRegression, False, "balanced", wine),
        (CodedLogisticRegression, True, "mapping", wine),
        (CodedLinearSVC, True, None, wine),
        (CodedLinearSVC, True, "balanced", cancer),
        (CodedLinearSVC, False, "mapping", wine),
    ],
)
def test_weights_of_samples_and_classes(
    kind: type[CodedClassifier],
    data: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    class_weight: Any,
    weighted: bool,
) -> None:
    rows, codes = (part.numpy() for part in data())
    if class_weight == "mapping":
        class_weight = {0: 0.3, 1: 2.5}
    weights = np.random.default_rng(0).integers(0, 4, len(codes)) * 0.7 if weighted else None
    model = kind(class_weight=class_weight, C=0.3)
    theirs = counterpart(model, class_weight=class_weight, C=0.3).fit(rows, codes, sample_weight=weights)
    model.fit(rows, codes, sample_weight=weights)
    np.testing.assert_allclose(model.coef_, theirs.coef_, atol=5e-5)
    np.testing.assert_allclose(model.intercept_, theirs.intercept_, atol=5e-5)
    if weights is not None and class_weight is None:
        repeated = kind(C=0.3 * 0.7).fit(
            *(np.repeat(one, np.round(weights / 0.7).astype(int), axis=0) for one in (rows, codes))
        )
        np.testing.assert_allclose(model.coef_, repeated.coef_, atol=5e-5)


@pytest.mark.parametrize(
    ("options", "weights", "message"),
    [
        ({}, [1, 1], "sample_weight: 3 numbers of at least 0 are due"),
        ({}, [[1, 1, 1]], "sample_weight: 3 numbers of at least 0 are due"),
        ({}, [1, 1, -1], "sample_weight: 3 numbers of at least 0 are due"),
        ({}, [1, 1, np.nan], "Input sample_weight contains NaN"),
        ({}, [1, 0, 0], "sample_weight is above 0 for samples of fewer than 2 classes"),
        ({}, [0, 0, 0], "at least one non-zero number"),
        ({"class_weight": "even"}, None, "class_weight = 'even': give a mapping, 'balanced' or None"),
        ({"class_weight": {0: -1.0}}, None, "weights must be numbers above 0"),
    ],
)
def test_weights_that_are_none(options: dict[str, Any], weights: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodedLinearSVC(**options).fit(np.eye(3), [0, 1, 1], sample_weight=weights)


@pytest.mark.parametrize(("kind", "data"), [(CodedLogisticRegression, cancer), (CodedLinearSVC, wine)])
def test_another_fit_begins_with_the_last_one(
    kind: type[CodedClassifier], data: Callable[[], tuple[torch.Tensor, torch.Tensor]]
) -> None:
    rows, codes = (part.numpy() for part in data())
    model = kind(warm_start=True).fit(rows, codes)
    first, coefficients = np.max(model.n_iter_), model.coef_
    model.fit(rows, codes)
    assert np.max(model.n_iter_) <= 1 < first
    np.testing.assert_allclose(model.coef_, coefficients, atol=1e-4)
    model.set_params(C=1.1).fit(rows, codes)
    cold = kind(C=1.1).fit(rows, codes)
    np.testing.assert_allclose(model.coef_, cold.coef_, atol=1e-4)
    with pytest.raises(ValueError, match=r"warm_start: the last fit has coef_ of shape"):
        model.fit(rows[:, :5], codes)


@pytest.mark.parametrize(
    ("kind", "form"), [(CodedLogisticRegression, np.asarray), (CodedLinearSVC, sparse.csr_matrix)]
)
def test_float32_stays(kind: type[CodedClassifier], form: Callable[[Any], Any]) -> None:
    rows, codes = (part.numpy() for part in cancer())
    single = form(rows.astype(np.float32))
    model, double = kind().fit(single, codes), kind().fit(rows, codes)
    assert {one.dtype for one in (model.coef_, model.intercept_, model.decision_function(single))} == {
        np.dtype(np.float32)
    }
    np.testing.assert_allclose(model.coef_, double.coef_, atol=1e-4)
    if isinstance(model, CodedLogisticRegression):
        assert model.predict_proba(single).dtype == np.float32
    assert double.coef_.dtype == kind().fit(rows.astype(int), codes).coef_.dtype == np.float64


def test_iterations_are_of_the_type_of_scikit_learn() -> None:
    rows, codes = (part.numpy() for part in wine())
    for model in (CodedLogisticRegression(), CodedLinearSVC()):
        mine, theirs = model.fit(rows, codes).n_iter_, counterpart(model).fit(rows, codes).n_iter_
        assert np.shape(mine) == np.shape(theirs)
        assert type(mine) is type(theirs)


@pytest.mark.parametrize("solver", ["lbfgs", "gd"])
def test_no_penalty(solver: str) -> None:
    rows, labels = mixed()
    model = CodedLogisticRegression(C=np.inf, solver=solver, max_iter=5000).fit(rows, labels)
    theirs = LogisticRegression(C=np.inf, solver="newton-cholesky", tol=1e-12).fit(rows, labels)
    np.testing.assert_allclose(model.coef_, theirs.coef_, atol=1e-4)
    np.testing.assert_allclose(model.intercept_, theirs.intercept_, atol=1e-4)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_numbers_of_numpy_are_numbers() -> None:
    rows, labels = mixed()
    model = CodedLogisticRegression(C=np.float32(0.5)).fit(rows, labels)  # type: ignore[arg-type]
    np.testing.assert_allclose(model.coef_, CodedLogisticRegression(C=0.5).fit(rows, labels).coef_)
    found = [
        CodedLogisticRegression(solver="gd", learning_rate=rate, max_iter=5, tol=1.0).fit(rows, labels).coef_
        for rate in (0.1, np.float64(0.1))
    ]
    np.testing.assert_array_equal(found[0], found[1])
