"""The linear support vector machine by coded training."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from typing_extensions import override

from farflung.coded.estimators.classifier import CodedClassifier, signs, solver_options
from farflung.coded.objectives import Hinge, Objective, SquaredHinge
from farflung.coded.solvers import GD, LBFGS, Bundle, OneVsRest, Solver
from farflung.errors import UnknownName

__all__ = ["CodedLinearSVC"]


class CodedLinearSVC(CodedClassifier):
    """A linear support vector machine, as scikit-learn's ``LinearSVC``; more than two classes are one against the rest.

    The products of all classes travel in the same rounds.

    Args:
      loss: ``"squared_hinge"`` or ``"hinge"``.
      C: weight of the losses, above 0: the larger, the weaker is the penalty.
      fit_intercept: whether there is an intercept; it is penalised as the weight of a constant feature.
      intercept_scaling: the constant feature: the larger, the less the penalty of the intercept counts.
      solver: ``"lbfgs"`` for the squared hinge, ``"bundle"`` for the hinge, or ``"gd"`` for either; by default the one
        for the loss. See :class:`farflung.coded.LBFGS`, :class:`farflung.coded.Bundle` and :class:`farflung.coded.GD`.
      tol: the gap, relative to the objective, at which the solver has converged; by default 1e-10, and 1e-4 for
        ``"bundle"``, whose gap is a proof. It is another measure than scikit-learn's ``tol``: above the default the
        coefficients are less exact.
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
        self.loss = loss
        self.C = C
        self.fit_intercept = fit_intercept
        self.intercept_scaling = intercept_scaling
        self.solver = solver
        self.tol = tol
        self.max_iter = max_iter
        self.learning_rate = learning_rate
        self.devices = devices
        self.partitions = partitions
        self.code = code
        self.seed = seed

    @override
    def _objective(self, codes: Tensor) -> tuple[Objective, Tensor]:
        losses: dict[str, type[Hinge | SquaredHinge]] = {"hinge": Hinge, "squared_hinge": SquaredHinge}
        if self.loss not in losses:
            raise UnknownName("loss", self.loss, losses)
        objective = losses[self.loss](
            C=self.C, fit_intercept=self.fit_intercept, intercept_scaling=self.intercept_scaling
        )
        return objective, signs(codes)

    @override
    def _solver(self) -> Solver[Any]:
        one: Solver[Any]
        name = self.solver or ("bundle" if self.loss == "hinge" else "lbfgs")
        if name == "lbfgs":
            one = LBFGS(**solver_options(tol=self.tol))
        elif name == "bundle":
            one = Bundle(**solver_options(tol=self.tol))
        elif name == "gd":
            one = GD(**solver_options(tol=self.tol, learning_rate=self.learning_rate))
        else:
            raise UnknownName("solver", name, ["bundle", "gd", "lbfgs"])
        return one if len(self.classes_) == 2 else OneVsRest(one)
