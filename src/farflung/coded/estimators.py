"""Coded training in scikit-learn's conventions."""

from __future__ import annotations

from farflung.extras import need

need("farflung.coded.estimators", "sklearn", extra="sklearn")

import warnings
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils.extmath import safe_sparse_dot
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from farflung.coded.blocks import Holding
from farflung.coded.coordinator import Coordinator, Settings
from farflung.coded.device import Device
from farflung.coded.linear_model import HeldProducts, Objective, Problem
from farflung.coded.parts import partitioned
from farflung.coded.run import Learner, Trained, train
from farflung.coded.solvers import Iterate, Solver
from farflung.errors import BadLabels, BadParameter, ConfigError
from farflung.sim import VirtualRuntime, VirtualWorld
from farflung.tasks import Pending

__all__ = ["CodedClassifier", "CodedLinearSVC", "CodedLogisticRegression"]


_ROWS = 4096
"""Rows of a sparse matrix that are made dense at a time."""


class CodedClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A linear classifier, whose model is its subclass's."""

    _model: ClassVar[str]
    loss: str | None = None
    intercept_scaling = 1.0

    def __init__(
        self,
        *,
        C: float = 1.0,
        fit_intercept: bool = True,
        solver: str | None = None,
        tol: float | None = None,
        max_iter: int = 1000,
        learning_rate: float | None = None,
        devices: int = 4,
        partitions: int | None = None,
        code: str = "rlnc",
        seed: int = 0,
    ) -> None:
        self.C = C
        self.fit_intercept = fit_intercept
        self.solver = solver
        self.tol = tol
        self.max_iter = max_iter
        self.learning_rate = learning_rate
        self.devices = devices
        self.partitions = partitions
        self.code = code
        self.seed = seed

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
        classes, solver = len(self.classes_), self.solver
        if solver == "gd" and self.learning_rate is not None:
            solver = f"gd(learning_rate={self.learning_rate!r})"
        learner = Learner(self._model, self.loss, self.C, solver, self.tol)
        objective = replace(
            learner.objective(classes),
            fit_intercept=self.fit_intercept,
            intercept_scaling=self.intercept_scaling,
        )
        targets = partial(learner.targets, classes=classes)
        found = self._trained(matrix, codes, objective, learner.minimiser(classes), targets)
        coefficients, intercepts = Problem(HeldProducts(matrix), objective, targets(codes)).split(
            found.weights
        )
        self.coef_, self.intercept_ = coefficients.T.numpy().copy(), intercepts.numpy()
        return found

    def _settings(self, rows: int) -> Settings:
        """Makes the settings of a run: whole blocks are answered, and no device is expected to vanish.

        Args:
          rows: of the samples; there are no more partitions.

        Raises:
          ConfigError: a value out of its range; begins with its name.
        """
        partitions = self.partitions
        if partitions is None:
            partitions = max(1, self.devices - max(1, self.devices // 4))
        return Settings(
            min(partitions, rows), self.devices, code=self.code, seed=self.seed, redundancy=0, pieces=1
        )

    def _trained(
        self,
        matrix: Tensor,
        codes: Tensor,
        objective: Objective,
        solver: Solver[Any],
        targets: Callable[[Tensor], Tensor],
    ) -> Iterate:
        """Trains by the protocol of devices, in virtual time, in which messages and computations take none.

        The first devices bring a partition each, consecutive rows.
        """
        settings, labels = self._settings(len(matrix)), codes.to(torch.float64)
        parts = [(matrix[rows], labels[rows]) for rows in partitioned(len(matrix), settings.partitions)]
        found: list[Trained] = []

        async def coordinate(runtime: VirtualRuntime) -> None:
            coordinator = Coordinator(runtime, settings)
            made = await train(
                coordinator,
                objective,
                solver,
                lambda labels: targets(labels.to(torch.int64)),
                max_iterations=self.max_iter,
            )
            found.append(made)

        async def attend(runtime: VirtualRuntime) -> None:
            place = runtime.comm.rank - 1
            holding = Holding(str(place), *parts[place]) if place < len(parts) else Holding()
            await Device(runtime, holding).run()

        world = VirtualWorld(1 + settings.devices, whole=False)
        first, *others = world.runtimes
        bodies: list[Coroutine[Pending[Any], None, None]] = [coordinate(first), *map(attend, others)]
        world.run(bodies)
        return found[0].iterate


def _dense(X: Any) -> Tensor:
    """As a dense tensor; a sparse matrix block by block."""
    if isinstance(X, np.ndarray):
        return torch.from_numpy(np.require(X, requirements="W"))
    matrix = torch.empty(X.shape, dtype=torch.float64)
    for start in range(0, len(matrix), _ROWS):
        X[start : start + _ROWS].toarray(out=matrix[start : start + _ROWS].numpy())
    return matrix


class CodedLogisticRegression(CodedClassifier):
    """Logistic regression with an L2 penalty, as scikit-learn's ``LogisticRegression``: binary, or multinomial.

    Args:
      C: weight of the losses, above 0: the larger, the weaker is the penalty.
      fit_intercept: whether there is an intercept; it is not penalised.
      solver: ``"lbfgs"``, the default, or ``"gd"``; see :class:`farflung.coded.LBFGS` and :class:`farflung.coded.GD`.
      tol: the gap, relative to the objective, at which the solver has converged; by default 1e-10. It is another
        measure than scikit-learn's ``tol``: above the default the coefficients are less exact.
      max_iter: the most iterates; each is a product with the samples and one with their transpose.
      learning_rate: of ``"gd"``; by default from the samples.
      devices: how many hold the samples.
      partitions: how many parts the samples are cut into; by default from the number of devices.
      code: of the devices beyond the partitions.
      seed: of the code.

    Attributes:
      classes_: the labels, in order.
      coef_: (1, features) for two classes, else (classes, features).
      intercept_: (1,) or (classes,).
      n_features_in_: columns of the samples.
      n_iter_: iterates that were taken.
      objective_: what is minimised, at the end.
    """

    _model = "logistic"

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """The probability of each class, (samples, classes)."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """The logarithm of each class's probability, (samples, classes)."""
        margins = torch.from_numpy(self.decision_function(X))
        if margins.dim() == 1:
            margins = torch.stack([torch.zeros_like(margins), margins], dim=1)
        return margins.log_softmax(dim=1).numpy()


class CodedLinearSVC(CodedClassifier):
    """A linear support vector machine, as scikit-learn's ``LinearSVC``; more than two classes are one against the rest.

    The products of all classes travel in the same rounds.

    Args:
      loss: ``"squared_hinge"`` or ``"hinge"``, whose kink is a parabola; see :class:`farflung.coded.Hinge`.
      C: weight of the losses, above 0: the larger, the weaker is the penalty.
      fit_intercept: whether there is an intercept; it is penalised as the weight of a constant feature.
      intercept_scaling: the constant feature: the larger, the less the penalty of the intercept counts.
      solver: ``"lbfgs"``, the default, or ``"gd"``; see :class:`farflung.coded.LBFGS` and :class:`farflung.coded.GD`.
      tol: the gap, relative to the objective, at which the solver has converged; by default 1e-10. It is another
        measure than scikit-learn's ``tol``: above the default the coefficients are less exact.
      max_iter: the most iterates; each is a product with the samples and one with their transpose.
      learning_rate: of ``"gd"``; by default from the samples.
      devices: how many hold the samples.
      partitions: how many parts the samples are cut into; by default from the number of devices.
      code: of the devices beyond the partitions.
      seed: of the code.

    Attributes:
      classes_: the labels, in order.
      coef_: (1, features) for two classes, else (classes, features).
      intercept_: (1,) or (classes,).
      n_features_in_: columns of the samples.
      n_iter_: iterates that were taken; of the class that took most.
      objective_: what is minimised, at the end; the sum over the classes.
    """

    _model = "svc"

    def __init__(
        self,
        *,
        loss: str = "squared_hinge",
        C: float = 1.0,
        fit_intercept: bool = True,
        intercept_scaling: float = 1.0,
        solver: str | None = None,
        tol: float | None = None,
        max_iter: int = 1000,
        learning_rate: float | None = None,
        devices: int = 4,
        partitions: int | None = None,
        code: str = "rlnc",
        seed: int = 0,
    ) -> None:
        super().__init__(
            C=C,
            fit_intercept=fit_intercept,
            solver=solver,
            tol=tol,
            max_iter=max_iter,
            learning_rate=learning_rate,
            devices=devices,
            partitions=partitions,
            code=code,
            seed=seed,
        )
        self.loss = loss
        self.intercept_scaling = intercept_scaling
