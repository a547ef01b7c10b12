"""Coded training with the interface of scikit-learn."""

from __future__ import annotations

from farflung.extras import require_modules

require_modules("farflung.coded.estimators", "sklearn", extra="sklearn")

import warnings
from collections.abc import Awaitable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_array
from sklearn.utils.class_weight import compute_class_weight
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from farflung.coded.blocks import BlockStore
from farflung.coded.coordinator import Coordinator, Settings
from farflung.coded.device import Device
from farflung.coded.linear_model import InMemoryProducts, Problem
from farflung.coded.parts import MAX_FEATURE, partition_rows
from farflung.coded.run import Learner, TrainingResult, simulate, train
from farflung.coded.solvers import Iterate, Solver
from farflung.errors import BadLabels, BadParameter, BadSamples, ConfigError
from farflung.sim import VirtualRuntime, VirtualWorld

__all__ = ["CodedClassifier", "CodedLinearSVC", "CodedLogisticRegression"]


_DTYPES = [np.float64, np.float32]
"""Data types of samples that the model keeps; others become the first."""
_CHUNK_ROWS = 4096
"""Number of rows of a sparse matrix that are converted at a time."""


@dataclass(kw_only=True, eq=False, repr=False)
class CodedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """Base of linear classifiers; the subclass names the model, and the parameters are fields."""

    _model: ClassVar[str]

    C: float = 1.0
    fit_intercept: bool = True
    class_weight: Mapping[Any, float] | str | None = None
    solver: str | None = None
    tol: float | None = None
    max_iter: int = 1000
    learning_rate: float | None = None
    warm_start: bool = False
    devices: int = 4
    partitions: int | None = None
    code: str = "rlnc"
    seed: int = 0

    def fit(self, X: Any, y: Any, sample_weight: ArrayLike | None = None) -> Self:
        """Fits the model to samples.

        Args:
          X: Samples, (samples, features), dense or sparse.
          y: Labels of two or more classes, (samples,).
          sample_weight: Factor of each sample's loss, (samples,), at least 0; 1 by default.

        Raises:
          BadLabels: fewer than two classes have samples with a weight above 0.
          BadParameter: a parameter is out of its range.
          BadSamples: X is so large that products with it are not finite.
        """
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=_DTYPES, order="C")
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        weights = self._compute_sample_weights(codes, sample_weight)
        if len(self.classes_) < 2:
            raise BadLabels(
                f"{type(self).__name__} needs samples of at least 2 classes in the data, but the data contains only "
                f"one class: {self.classes_[0]!r}"
            )
        if float(abs(X).max()) > MAX_FEATURE:
            raise BadSamples(
                f"X holds numbers above {MAX_FEATURE:g}, whose squares may not be finite: scale the features"
            )
        try:
            state = self._minimize(_to_dense(X), torch.from_numpy(codes), weights, X.dtype)
        except ConfigError as error:
            raise BadParameter(str(error)) from None
        if not state.has_converged:
            if state.has_stalled:
                cause = (
                    f"stopped after {state.iterations} iterations, as rounding errors allow no further one"
                )
                remedy = "centre and scale the features"
            else:
                cause = f"did not converge in {state.iterations} iterations"
                remedy = "raise max_iter, or scale the features"
            warnings.warn(
                f"{type(self).__name__} {cause} (gap {state.gap:.1e}): {remedy}",
                ConvergenceWarning,
                stacklevel=2,
            )
        self.objective_ = state.objective
        self.n_iter_: Any = (
            state.iterations if self._model == "svc" else np.array([state.iterations], np.int32)
        )
        return self

    def decision_function(self, X: ArrayLike) -> NDArray[Any]:
        """Computes margins: (samples,) for two classes, above 0 for the second; else (samples, classes)."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=_DTYPES, reset=False)
        margins: NDArray[Any] = safe_sparse_dot(X, self.coef_.T, dense_output=True) + self.intercept_
        return margins[:, 0] if margins.shape[1] == 1 else margins

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """Predicts the class of each sample."""
        margins = self.decision_function(X)
        codes = (margins > 0).astype(np.int64) if margins.ndim == 1 else margins.argmax(axis=1)
        classes: NDArray[Any] = self.classes_[codes]
        return classes

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _compute_sample_weights(self, codes: NDArray[Any], sample_weight: ArrayLike | None) -> Tensor | None:
        """Multiplies the weights of samples and classes; returns None if neither is given.

        Raises:
          BadLabels: fewer than two classes have samples with a weight above 0.
          BadParameter: the weights are invalid.
        """
        if sample_weight is None and self.class_weight is None:
            return None
        weights = np.ones(len(codes))
        if sample_weight is not None:
            array = check_array(sample_weight, ensure_2d=False, dtype=np.float64, input_name="sample_weight")
            if array.shape not in ((), codes.shape) or (array < 0).any():
                raise BadParameter(f"sample_weight: {len(codes)} numbers of at least 0 are due, or one")
            weights *= array
        if not weights.any():
            raise BadParameter("Sample weights must contain at least one non-zero number")
        counts = np.bincount(codes, weights=weights)
        if np.count_nonzero(counts) < min(2, len(counts)):
            raise BadLabels(
                "sample_weight is above 0 for samples of fewer than 2 classes: weight more samples"
            )
        if self.class_weight == "balanced":
            mask = counts > 0
            factors = np.divide(
                counts.sum(), np.count_nonzero(mask) * counts, out=np.ones(len(counts)), where=mask
            )
        elif isinstance(self.class_weight, str):
            raise BadParameter(f"class_weight = {self.class_weight!r}: give a mapping, 'balanced' or None")
        else:
            factors = compute_class_weight(self.class_weight, classes=self.classes_, y=self.classes_[codes])
        if not (np.isfinite(factors).all() and (factors > 0).all()):
            raise BadParameter(f"class_weight = {self.class_weight!r}: weights must be numbers above 0")
        if self._model == "svc" and len(factors) > 2:  # as liblinear: other classes have the weight 1
            of_class = codes[:, None] == np.arange(len(factors))
            return torch.from_numpy(weights[:, None] * np.where(of_class, factors, 1.0))
        return torch.from_numpy(weights * factors[codes])[:, None]

    def _minimize(self, matrix: Tensor, codes: Tensor, weights: Tensor | None, dtype: Any) -> Iterate:
        """Minimises the objective, and sets ``coef_`` and ``intercept_``."""
        classes, solver = len(self.classes_), self.solver
        if solver == "gd" and self.learning_rate is not None:
            rate: Any = self.learning_rate
            solver = f"gd(learning_rate={rate.item() if isinstance(rate, np.generic) else rate!r})"
        learner = Learner(self._model, getattr(self, "loss", None), self.C, solver, self.tol)
        objective = replace(
            learner.build_objective(classes),
            fit_intercept=self.fit_intercept,
            intercept_scaling=getattr(self, "intercept_scaling", 1.0),
        )
        problem = Problem(InMemoryProducts(matrix), objective, learner.build_targets(codes, classes), weights)
        start, shape = None, (problem.shape[1], matrix.shape[1])
        previous: Any = self
        if self.warm_start and hasattr(previous, "coef_"):
            if previous.coef_.shape != shape:
                raise BadParameter(
                    f"warm_start: the last fit has coef_ of shape {previous.coef_.shape}, and {shape} is due: make "
                    "another estimator for other features or classes"
                )
            rows = [previous.coef_.T]
            if self.fit_intercept:
                rows.append(previous.intercept_[None] / getattr(self, "intercept_scaling", 1.0))
            start = torch.from_numpy(np.concatenate(rows).astype(np.float64))
        state = self._train(matrix, problem, learner.build_solver(classes), start)
        coefficients, intercepts = problem.split(state.weights)
        self.coef_ = coefficients.T.numpy().astype(dtype, order="C")
        self.intercept_ = intercepts.numpy().astype(dtype)
        return state

    def _train(self, matrix: Tensor, problem: Problem, solver: Solver[Any], start: Tensor | None) -> Iterate:
        """Trains by the protocol of devices, in virtual time, without delays.

        The first devices bring a partition each, consecutive rows, with the row numbers as labels. Blocks are
        answered whole, and no device is expected to vanish.
        """
        partitions = self.partitions
        if partitions is None:
            partitions = max(1, self.devices - max(1, self.devices // 4))
        settings = Settings(
            min(partitions, len(matrix)), self.devices, code=self.code, seed=self.seed, redundancy=0, pieces=1
        )
        numbers = torch.arange(len(matrix), dtype=torch.float64)
        parts = [(matrix[rows], numbers[rows]) for rows in partition_rows(len(matrix), settings.partitions)]
        weights = problem.sample_weights

        def create_device(runtime: VirtualRuntime) -> Device:
            place = runtime.comm.rank - 1
            return Device(
                runtime, BlockStore(str(place), *parts[place]) if place < len(parts) else BlockStore()
            )

        def train_all(coordinator: Coordinator) -> Awaitable[TrainingResult]:
            return train(
                coordinator,
                problem.objective,
                solver,
                lambda numbers: problem.targets[numbers.long()],
                max_iterations=self.max_iter,
                sample_weights=None if weights is None else lambda numbers: weights[numbers.long()],
                start=start,
            )

        world = VirtualWorld(1 + settings.devices, needs_all_members=False)
        return simulate(world, settings, create_device, train_all).iterate


def _to_dense(X: Any) -> Tensor:
    """Converts to a dense tensor; a sparse matrix block by block."""
    if isinstance(X, np.ndarray):
        return torch.from_numpy(np.require(X, np.float64, requirements="W"))
    matrix = torch.empty(X.shape, dtype=torch.float64)
    X = X.astype(np.float64, copy=False)
    for start in range(0, len(matrix), _CHUNK_ROWS):
        X[start : start + _CHUNK_ROWS].toarray(out=matrix[start : start + _CHUNK_ROWS].numpy())
    return matrix


class CodedLogisticRegression(CodedClassifier):
    """Logistic regression with an L2 penalty, as scikit-learn's ``LogisticRegression``.

    Args:
      C: Weight of the losses, above 0: a larger weight means a weaker penalty; ``numpy.inf`` means none.
      fit_intercept: True to fit an intercept, without penalty.
      class_weight: Factors of the losses of classes, by label; ``"balanced"`` is their inverse frequency.
      solver: Solver, ``"lbfgs"`` or ``"gd"``; see :class:`farflung.coded.LBFGS` and :class:`farflung.coded.GD`.
      tol: Gap at which the solver has converged: the bound of the objective above its minimum, relative to it;
        1e-10 by default. Unlike scikit-learn's ``tol``, any larger value makes the coefficients less exact.
      max_iter: Maximum number of iterates; each is a product with the samples and one with their transpose.
      learning_rate: Learning rate of ``"gd"``; by default derived from the samples.
      warm_start: True to start a further fit from the coefficients of the last one.
      devices: Number of devices that hold the samples.
      partitions: Number of partitions of the samples; by default derived from the number of devices.
      code: Code of the devices beyond the partitions.
      seed: Seed of the code.

    Attributes:
      classes_: Labels, in order.
      coef_: Coefficients, (1, features) for two classes, else (classes, features); float32 if the samples are.
      intercept_: Intercepts, (1,) or (classes,).
      n_features_in_: Number of columns of the samples.
      n_iter_: Number of iterates, (1,).
      objective_: Objective at the end.
    """

    _model = "logistic"

    def predict_proba(self, X: ArrayLike) -> NDArray[Any]:
        """Computes the probability of each class, (samples, classes)."""
        probabilities: NDArray[Any] = np.exp(self.predict_log_proba(X))
        return probabilities

    def predict_log_proba(self, X: ArrayLike) -> NDArray[Any]:
        """Computes the logarithm of each class's probability, (samples, classes)."""
        margins = torch.from_numpy(self.decision_function(X))
        if margins.dim() == 1:
            margins = torch.stack([torch.zeros_like(margins), margins], dim=1)
        return margins.log_softmax(dim=1).numpy()


@dataclass(kw_only=True, eq=False, repr=False)
class CodedLinearSVC(CodedClassifier):
    """Linear support vector machine, as scikit-learn's ``LinearSVC``; more than two classes are one-vs-rest.

    Args:
      loss: Loss, ``"squared_hinge"``, or ``"hinge"`` with a parabola as its kink.
      C: Weight of the losses, above 0: a larger weight means a weaker penalty; ``numpy.inf`` means none.
      fit_intercept: True to fit an intercept, penalised as the weight of a constant feature.
      intercept_scaling: Constant feature: a larger one reduces the effect of the intercept's penalty.
      class_weight: Factors of the losses of classes, by label, where they are positive; or ``"balanced"``.
      solver: Solver, ``"lbfgs"`` or ``"gd"``; see :class:`farflung.coded.LBFGS` and :class:`farflung.coded.GD`.
      tol: Bound of the objective above its minimum, relative to it, at which the solver has converged; 1e-10 by
        default.
      max_iter: Maximum number of iterates; each is a product with the samples and one with their transpose.
      learning_rate: Learning rate of ``"gd"``; by default derived from the samples.
      warm_start: True to start a further fit from the coefficients of the last one.
      devices: Number of devices that hold the samples.
      partitions: Number of partitions of the samples; by default derived from the number of devices.
      code: Code of the devices beyond the partitions.
      seed: Seed of the code.

    Attributes:
      classes_: Labels, in order.
      coef_: Coefficients, (1, features) for two classes, else (classes, features); float32 if the samples are.
      intercept_: Intercepts, (1,) or (classes,).
      n_features_in_: Number of columns of the samples.
      n_iter_: Number of iterates, of the class that took most.
      objective_: Objective at the end, summed over the classes.
    """

    _model = "svc"

    loss: str = "squared_hinge"
    intercept_scaling: float = 1.0
