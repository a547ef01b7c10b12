"""Products of a matrix that this process holds: the reference for those of devices."""

from __future__ import annotations

from torch import Tensor

from farflung.errors import ConfigError
from farflung.tasks import Pending, done

__all__ = ["HeldProducts"]


class HeldProducts:
    """A matrix in memory.

    Args:
      matrix: (samples, features), float64.

    Raises:
      ConfigError: of another shape.
    """

    def __init__(self, matrix: Tensor) -> None:
        if matrix.dim() != 2:
            raise ConfigError(f"products: expected a matrix, found {matrix.dim()} dimensions")
        self._matrix = matrix
        self.samples, self.features = matrix.shape

    def times(self, weights: Tensor) -> Pending[Tensor]:
        return done(self._matrix @ weights)

    def transposed_times(self, residuals: Tensor) -> Pending[Tensor]:
        return done(self._matrix.T @ residuals)
