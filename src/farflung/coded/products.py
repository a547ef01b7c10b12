"""The two matrix products that full-batch training of a linear model needs."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Protocol

from torch import Tensor

__all__ = ["Products"]


class Products(Protocol):
    """A matrix :math:`X` of samples by features that lies elsewhere, by what it is multiplied with; all in float64."""

    @property
    def samples(self) -> int:
        """Rows of :math:`X`, without padding."""
        ...

    @property
    def features(self) -> int:
        """Columns of :math:`X`."""
        ...

    def times(self, weights: Tensor) -> Awaitable[Tensor]:
        """:math:`X W`.

        Args:
          weights: (features, outputs).

        Returns:
          (samples, outputs).
        """
        ...

    def transposed_times(self, residuals: Tensor) -> Awaitable[Tensor]:
        """:math:`X^T R`.

        Args:
          residuals: (samples, outputs).

        Returns:
          (features, outputs).
        """
        ...
