"""What training ends with: weights, intercepts, and the classes that they tell apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from farflung.coded.classes import Classes
from farflung.errors import CheckpointError, DataError
from farflung.files import reading
from farflung.replica import load_tree, save_tree

__all__ = ["LinearModel"]


@dataclass(frozen=True, slots=True, eq=False)
class LinearModel:
    """A linear classifier.

    Args:
      weights: (features, outputs), one output for two classes, else one for each.
      intercepts: (outputs,).
      classes: that are told apart.
    """

    weights: Tensor
    intercepts: Tensor
    classes: Classes

    def predict(self, samples: Tensor) -> Tensor:
        """The label of each sample's class.

        Args:
          samples: (samples, features), float64.

        Returns:
          (samples,), float64; with one class that is told apart from the rest, 1 for that and 0 for these.

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
        """The share of samples whose class is predicted."""
        return float((self._codes(samples) == self.classes.codes(labels)).double().mean())

    def save(self, path: Path) -> None:
        """Writes it; see :func:`farflung.replica.save_tree`."""
        classes = self.classes
        save_tree(
            path,
            {
                "weights": self.weights,
                "intercepts": self.intercepts,
                "classes": list(classes.labels),
                "positive": classes.positive,
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
