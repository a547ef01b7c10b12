"""What the estimators have in common: from samples to a solver, and from weights to decisions."""

from __future__ import annotations

import warnings
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from farflung.coded.held import HeldProducts
from farflung.coded.local import fit_locally, local_settings
from farflung.coded.objectives import Objective
from farflung.coded.problem import Problem
from farflung.coded.solvers import Iterate, Solver
from farflung.errors import BadLabels, BadParameter, ConfigError

__all__ = ["CodedClassifier", "signs", "solver_options"]

_ROWS = 4096
"""Rows of a sparse matrix that are made dense at a time."""


class CodedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A linear classifier; a subclass says what it minimises, and by which solver."""

    def fit(self, X: ArrayLike, y: ArrayLike) -> Self:
        """Learns from samples.

        Args:
          X: (samples, features), dense or sparse.
          y: (samples,), labels of two or more classes.

        Raises:
          BadLabels: fewer classes.
          BadParameter: a parameter out of its range.
        """
        X, y = validate_data(self, X, y, accept_sparse="csr", dtype=np.float64, order="C")
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise BadLabels(
                f"{type(self).__name__} needs samples of at least 2 classes in the data, but the data contains only "
                f"one class: {self.classes_[0]!r}"
            )
        try:
            found = self._minimum(_dense(X), torch.from_numpy(codes))
        except ConfigError as error:
            raise BadParameter(str(error)) from None
        if not found.converged:
            warnings.warn(
                f"{type(self).__name__} did not converge in {found.iterations} iterations (gap {found.gap:.1e}): raise "
                "max_iter, or scale the features",
                ConvergenceWarning,
                stacklevel=2,
            )
        self.n_iter_, self.objective_ = found.iterations, found.objective
        return self

    def decision_function(self, X: ArrayLike) -> NDArray[np.float64]:
        """The margins: (samples,) for two classes, where above 0 is the second; else (samples, classes)."""
        check_is_fitted(self)
        X = validate_data(self, X, accept_sparse="csr", dtype=np.float64, reset=False)
        margins: NDArray[np.float64] = safe_sparse_dot(X, self.coef_.T, dense_output=True) + self.intercept_
        return margins[:, 0] if margins.shape[1] == 1 else margins

    def predict(self, X: ArrayLike) -> NDArray[Any]:
        """The likeliest class of each sample."""
        margins = self.decision_function(X)
        codes = (margins > 0).astype(np.int64) if margins.ndim == 1 else margins.argmax(axis=1)
        classes: NDArray[Any] = self.classes_[codes]
        return classes

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags

    def _minimum(self, matrix: Tensor, codes: Tensor) -> Iterate:
        """Sets ``coef_`` and ``intercept_`` to what minimises the objective."""
        objective, targets = self._objective(codes)
        found = fit_locally(
            matrix,
            codes.to(torch.float64),
            local_settings(self.devices, self.partitions, len(matrix), code=self.code, seed=self.seed),
            objective,
            self._solver(),
            lambda labels: self._objective(labels.to(torch.int64))[1],
            max_iterations=self.max_iter,
        ).iterate
        coefficients, intercepts = Problem(HeldProducts(matrix), objective, targets).split(found.weights)
        self.coef_, self.intercept_ = coefficients.T.numpy().copy(), intercepts.numpy()
        return found

    def _objective(self, codes: Tensor) -> tuple[Objective, Tensor]:
        """What is minimised, and its targets, by the number of each sample's class."""
        raise NotImplementedError

    def _solver(self) -> Solver[Any]:
        """What minimises it."""
        raise NotImplementedError


def solver_options(**options: object) -> dict[str, Any]:
    """Those options of a solver that are given; the others have defaults of its own."""
    return {name: value for name, value in options.items() if value is not None}


def signs(codes: Tensor) -> Tensor:
    """Targets of -1.0 and 1.0: one output for two classes, otherwise one for each class against the rest."""
    classes = int(codes.max()) + 1
    wanted = torch.arange(classes) if classes > 2 else torch.tensor([1])
    return torch.where(codes[:, None] == wanted, 1.0, -1.0).to(torch.float64)


def _dense(X: Any) -> Tensor:
    """As a dense tensor; a sparse matrix block by block."""
    if isinstance(X, np.ndarray):
        return torch.from_numpy(np.require(X, requirements="W"))
    matrix = torch.empty(X.shape, dtype=torch.float64)
    for start in range(0, len(matrix), _ROWS):
        X[start : start + _ROWS].toarray(out=matrix[start : start + _ROWS].numpy())
    return matrix
