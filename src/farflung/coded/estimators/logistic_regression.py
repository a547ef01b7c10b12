"""Logistic regression by coded training."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor
from typing_extensions import override

from farflung.coded.estimators.classifier import CodedClassifier, signs, solver_options
from farflung.coded.objectives import Logistic, Multinomial, Objective
from farflung.coded.solvers import GD, LBFGS, Solver
from farflung.errors import UnknownName

__all__ = ["CodedLogisticRegression"]


class CodedLogisticRegression(CodedClassifier):
    """Logistic regression with an L2 penalty, as scikit-learn's ``LogisticRegression``: binary, or multinomial.

    Args:
      C: weight of the losses, above 0: the larger, the weaker is the penalty.
      fit_intercept: whether there is an intercept; it is not penalised.
      solver: ``"lbfgs"`` or ``"gd"``; see :class:`farflung.coded.LBFGS` and :class:`farflung.coded.GD`.
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

    def __init__(
        self,
        *,
        C: float = 1.0,
        fit_intercept: bool = True,
        solver: str = "lbfgs",
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

    def predict_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """The probability of each class, (samples, classes)."""
        return np.exp(self.predict_log_proba(X))

    def predict_log_proba(self, X: ArrayLike) -> NDArray[np.float64]:
        """The logarithm of each class's probability, (samples, classes)."""
        margins = torch.from_numpy(self.decision_function(X))
        if margins.dim() == 1:
            margins = torch.stack([torch.zeros_like(margins), margins], dim=1)
        return margins.log_softmax(dim=1).numpy()

    @override
    def _objective(self, codes: Tensor) -> tuple[Objective, Tensor]:
        options: dict[str, Any] = {"C": self.C, "fit_intercept": self.fit_intercept}
        classes = len(self.classes_)
        if classes == 2:
            return Logistic(**options), signs(codes)
        return Multinomial(classes=classes, **options), codes

    @override
    def _solver(self) -> Solver[Any]:
        if self.solver == "lbfgs":
            return LBFGS(**solver_options(tol=self.tol))
        if self.solver == "gd":
            return GD(**solver_options(tol=self.tol, learning_rate=self.learning_rate))
        raise UnknownName("solver of logistic regression", self.solver, ["gd", "lbfgs"])
