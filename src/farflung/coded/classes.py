"""The classes that labels name, and each label as the number of its class."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.errors import DataError

__all__ = ["Classes"]


@dataclass(frozen=True, slots=True)
class Classes:
    """Labels that are told apart.

    Args:
      labels: of each class, ascending.
      positive: of the one class that is told apart from the rest; ``None``: all are told apart.
    """

    labels: tuple[float, ...]
    positive: float | None = None

    @staticmethod
    def of(labels: Tensor, positive: float | None = None) -> Classes:
        """Those that there are.

        Raises:
          DataError: there is one class alone.
        """
        found = tuple(labels.unique().tolist())
        if positive is not None and positive not in found:
            raise DataError(f"positive = {positive:g}: no sample has that label; there are {listed(found)}")
        if len(found) < 2:
            raise DataError(
                f"all samples have the label {listed(found)}: there is nothing to tell apart; give the devices samples "
                "of two classes or more"
            )
        return Classes(found, positive)

    @property
    def count(self) -> int:
        """How many are told apart."""
        return len(self.labels) if self.positive is None else 2

    def codes(self, labels: Tensor) -> Tensor:
        """The number of each label's class, (samples,) int64; -1: it is none of them."""
        if self.positive is not None:
            return (labels == self.positive).to(torch.int64)
        known = torch.tensor(self.labels, dtype=torch.float64)
        places = torch.searchsorted(known, labels.to(torch.float64)).clamp_(max=len(known) - 1)
        return torch.where(known[places] == labels, places, -1)

    def named(self, codes: Tensor) -> Tensor:
        """The labels of classes by number; with one told apart from the rest, whether it is that one: 0 or 1."""
        if self.positive is not None:
            return codes.to(torch.float64)
        return torch.tensor(self.labels, dtype=torch.float64)[codes]

    def strange(self, labels: Tensor) -> str:
        """What is wrong with labels that come later; empty: nothing."""
        unknown = labels[self.codes(labels) < 0].unique().tolist()
        if not unknown:
            return ""
        return f"it has the label {listed(unknown)}, and training began with {listed(self.labels)}"


def listed(labels: tuple[float, ...] | list[float]) -> str:
    """Lists class labels in a message."""
    return ", ".join(f"{label:g}" for label in labels[:10]) + (", ..." if len(labels) > 10 else "")
