"""What a coded run learns: a linear classifier, by a loss and a solver."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.coded.objectives import Hinge, Logistic, Multinomial, Objective, SquaredHinge
from farflung.coded.solvers import SOLVERS, OneVsRest, Solver
from farflung.errors import ConfigError, UnknownName, Unsupported
from farflung.spec import build, name_of

__all__ = ["Learner"]

_LOSSES: dict[str, type[Hinge | SquaredHinge]] = {"hinge": Hinge, "squared_hinge": SquaredHinge}
_MODELS = ("logistic", "svc")


@dataclass(frozen=True, slots=True)
class Learner:
    """A linear classifier with an L2 penalty.

    Args:
      model: ``"logistic"`` regression, multinomial for more than two classes; or ``"svc"``, a support vector machine,
        one class against the rest for more than two.
      loss: of the latter, ``"squared_hinge"`` when not given, or ``"hinge"``.
      C: weight of the losses, above 0: the larger, the weaker is the penalty.
      solver: as text, such as ``gd(learning_rate=0.01)``; when not given ``bundle`` for the hinge, and otherwise
        ``lbfgs``. See :data:`farflung.coded.SOLVERS`.
      tolerance: the gap, relative to the objective, at which it has converged; when not given 1e-10, and 1e-4 for
        ``bundle``.
      positive: the label of a class that is told apart from the rest; all classes are when not given.

    Raises:
      ConfigError: a value out of its range, or a solver that does not fit the loss.
    """

    model: str = "logistic"
    loss: str | None = None
    C: float = 1.0
    solver: str | None = None
    tolerance: float | None = None
    positive: float | None = None

    def __post_init__(self) -> None:
        if self.model not in _MODELS:
            raise UnknownName("model", self.model, _MODELS)
        if self.loss is not None and self.model == "logistic":
            raise ConfigError(f"loss = {self.loss!r}: it is the svc's; logistic regression has its own")
        if self.loss is not None and self.loss not in _LOSSES:
            raise UnknownName("loss", self.loss, _LOSSES)
        self.objective(2)
        self.minimiser(2)

    def objective(self, classes: int) -> Objective:
        """What is minimised where there are so many classes."""
        if self.model == "svc":
            return _LOSSES[self.loss or "squared_hinge"](C=self.C)
        return Logistic(C=self.C) if classes == 2 else Multinomial(C=self.C, classes=classes)

    def targets(self, codes: Tensor, classes: int) -> Tensor:
        """What the objective takes, by the number of each sample's class."""
        if self.model == "logistic" and classes > 2:
            return codes
        wanted = torch.arange(classes) if classes > 2 else torch.tensor([1])
        return torch.where(codes[:, None] == wanted, 1.0, -1.0).to(torch.float64)

    def minimiser(self, classes: int) -> Solver[Any]:
        kinks = self.loss == "hinge"
        text = self.solver or ("bundle" if kinks else "lbfgs")
        unfit = "lbfgs" if kinks else "bundle"
        if name_of("solver", text) == unfit:
            why = "it gets stuck where a loss has kinks" if kinks else "it is for the hinge"
            raise Unsupported(f"solver = {text!r}: {why}; use {'bundle' if kinks else 'lbfgs'} or gd")
        solver: Any = build("solver", text, SOLVERS)
        if self.tolerance is not None:
            solver = dataclasses.replace(solver, tol=self.tolerance)
        return OneVsRest(solver) if self.model == "svc" and classes > 2 else solver
