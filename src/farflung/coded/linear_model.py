"""Linear classifiers: their settings, the classes that labels name, and the trained model."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from farflung.coded.objectives import Hinge, Logistic, Multinomial, Objective, SquaredHinge
from farflung.coded.solvers import SOLVERS, OneVsRest, Solver
from farflung.errors import CheckpointError, ConfigError, DataError, UnknownName
from farflung.files import reading
from farflung.replica import load_tree, save_tree
from farflung.spec import build, name_of

__all__ = ["LOSSES", "Classes", "Learner", "LinearModel", "targets_of", "without_bundle"]

LOSSES: dict[str, type[Objective]] = {"hinge": Hinge, "squared_hinge": SquaredHinge}
"""Losses of support vector machines."""
_MODELS = ("logistic", "svc")


@dataclass(frozen=True, slots=True)
class Learner:
    """Settings of a linear classifier with an L2 penalty.

    Args:
      model: ``"logistic"`` regression, multinomial for more than two classes; or ``"svc"``, a support vector machine,
        one class against the rest for more than two.
      loss: of the latter, ``"squared_hinge"`` when not given, or ``"hinge"``.
      C: weight of the losses, above 0: the larger, the weaker is the penalty.
      solver: as text, such as ``gd(learning_rate=0.01)``; ``lbfgs`` when not given. See
        :data:`farflung.coded.SOLVERS`.
      tolerance: the gap, relative to the objective, at which it has converged; 1e-10 when not given.
      positive: the label of one class against all others; all classes are distinguished when not given.

    Raises:
      ConfigError: a value out of its range.
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
        if self.loss is not None and self.loss not in LOSSES:
            raise UnknownName("loss", self.loss, LOSSES)
        self.objective(2)
        self.minimiser(2)

    def objective(self, classes: int) -> Objective:
        """Makes the objective for a number of classes."""
        if self.model == "svc":
            return LOSSES[self.loss or "squared_hinge"](C=self.C)
        return Logistic(C=self.C) if classes == 2 else Multinomial(C=self.C, classes=classes)

    def targets(self, codes: Tensor, classes: int) -> Tensor:
        """Makes the targets of the objective from the number of each sample's class."""
        return codes if self.model == "logistic" and classes > 2 else targets_of(codes, classes)

    def minimiser(self, classes: int) -> Solver[Any]:
        """Makes the solver for a number of classes."""
        solver: Any = build("solver", without_bundle(self.solver) or "lbfgs", SOLVERS)
        if self.tolerance is not None:
            solver = dataclasses.replace(solver, tol=self.tolerance)
        return OneVsRest(solver) if self.model == "svc" and classes > 2 else solver


def without_bundle(solver: str | None) -> str | None:
    """Replaces the solver ``bundle`` of 0.1 by ``lbfgs``, with a warning; until 0.3."""
    if solver is None or name_of("solver", solver) != "bundle":
        return solver
    warnings.warn(f"solver = {solver!r} is now lbfgs, for the hinge too", FutureWarning, stacklevel=3)
    return "lbfgs"


def targets_of(codes: Tensor, classes: int) -> Tensor:
    """Makes targets of -1.0 and 1.0: one output for two classes, else one for each class against the rest."""
    wanted = torch.arange(classes) if classes > 2 else torch.tensor([1])
    return torch.where(codes[:, None] == wanted, 1.0, -1.0).to(torch.float64)


@dataclass(frozen=True, slots=True)
class Classes:
    """The classes that labels name.

    Args:
      labels: of each class, ascending.
      positive: of one class against all others; ``None``: all classes are distinguished.
    """

    labels: tuple[float, ...]
    positive: float | None = None

    @staticmethod
    def of(labels: Tensor, positive: float | None = None) -> Classes:
        """Finds the classes of labels.

        Raises:
          DataError: there is one class alone.
        """
        found = tuple(labels.unique().tolist())
        if positive is not None and positive not in found:
            raise DataError(f"positive = {positive:g}: no sample has that label; there are {_listed(found)}")
        if len(found) < 2:
            raise DataError(
                f"all samples have the label {_listed(found)}: there is nothing to tell apart; give the devices "
                "samples of two classes or more"
            )
        return Classes(found, positive)

    @property
    def count(self) -> int:
        """The number of classes that are distinguished."""
        return len(self.labels) if self.positive is None else 2

    def codes(self, labels: Tensor) -> Tensor:
        """Numbers the class of each label, (samples,) int64; -1: none of the classes."""
        if self.positive is not None:
            return (labels == self.positive).to(torch.int64)
        known = torch.tensor(self.labels, dtype=torch.float64)
        places = torch.searchsorted(known, labels.to(torch.float64)).clamp_(max=len(known) - 1)
        return torch.where(known[places] == labels, places, -1)

    def named(self, codes: Tensor) -> Tensor:
        """Gives the labels of numbered classes; with a positive class, 1 for that and 0 for the others."""
        if self.positive is not None:
            return codes.to(torch.float64)
        return torch.tensor(self.labels, dtype=torch.float64)[codes]

    def strange(self, labels: Tensor) -> str:
        """Describes what is wrong with labels that come later; empty: nothing."""
        unknown = labels[self.codes(labels) < 0].unique().tolist()
        if not unknown:
            return ""
        return f"it has the label {_listed(unknown)}, and training began with {_listed(self.labels)}"


def _listed(labels: tuple[float, ...] | list[float]) -> str:
    return ", ".join(f"{label:g}" for label in labels[:10]) + (", ..." if len(labels) > 10 else "")


@dataclass(frozen=True, slots=True, eq=False)
class LinearModel:
    """A trained linear classifier.

    Args:
      weights: (features, outputs), one output for two classes, else one for each.
      intercepts: (outputs,).
      classes: that it distinguishes.
    """

    weights: Tensor
    intercepts: Tensor
    classes: Classes

    def predict(self, samples: Tensor) -> Tensor:
        """Predicts the label of each sample's class.

        Args:
          samples: (samples, features), float64.

        Returns:
          (samples,), float64; with a positive class, 1 for that and 0 for the others.

        Raises:
          DataError: another number of features.
        """
        return self.classes.named(self._codes(samples))

    def _codes(self, samples: Tensor) -> Tensor:
        if samples.shape[1] != len(self.weights):
            raise DataError(
                f"samples of {samples.shape[1]} features, for a model of {len(self.weights)}: give those that it was "
                "trained on"
            )
        margins = samples @ self.weights + self.intercepts
        return (margins[:, 0] > 0).long() if margins.shape[1] == 1 else margins.argmax(dim=1)

    def accuracy(self, samples: Tensor, labels: Tensor) -> float:
        """Computes the share of samples whose class is predicted."""
        return float((self._codes(samples) == self.classes.codes(labels)).double().mean())

    def save(self, path: Path) -> None:
        """Writes the model; see :func:`farflung.replica.save_tree`."""
        save_tree(
            path,
            {
                "weights": self.weights,
                "intercepts": self.intercepts,
                "classes": list(self.classes.labels),
                "positive": self.classes.positive,
            },
        )

    @staticmethod
    def load(path: Path) -> LinearModel:
        """Reads what :meth:`save` wrote.

        Raises:
          CheckpointError: absent, damaged, or of something else.
        """
        with reading(path, "not a linear model", CheckpointError):
            tree = load_tree(path)
            classes = Classes(tuple(map(float, tree["classes"])), tree["positive"])
            return LinearModel(tree["weights"], tree["intercepts"], classes)
