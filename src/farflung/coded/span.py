"""What rows of coefficients span, row by row."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

__all__ = ["TOLERANCE", "Span", "unit"]

TOLERANCE = 1e-6
"""Of a row's length, what has to lie outside a span for the row to add a dimension. With less, a decoding matrix of
both would have a condition above :data:`farflung.coded.MAX_CONDITION`."""


class Span:
    """The span of the rows so far, by an orthonormal basis; each row costs O(K rank).

    Args:
      partitions: K, the length of a row.
      tolerance: see :data:`TOLERANCE`.
    """

    def __init__(self, partitions: int, tolerance: float = TOLERANCE) -> None:
        self._basis = np.zeros((partitions, partitions))
        self._tolerance = tolerance
        self.rank = 0

    def add(self, row: Tensor) -> bool:
        """Takes a row, (K,) and float64; whether the rank grew."""
        basis = self._basis[: self.rank]
        rest = row.numpy()
        length = math.sqrt(rest @ rest)
        if len(basis) == len(rest) or not length:
            return False
        for _ in range(2):  # the second time takes what rounding has left: Gram-Schmidt, twice is enough
            rest = rest - (basis @ rest) @ basis
        outside = math.sqrt(rest @ rest)
        if not outside > self._tolerance * length:
            return False
        self._basis[self.rank] = rest / outside
        self.rank += 1
        return True


def unit(rows: Tensor) -> Tensor:
    """Rows of length 1, (..., K); zeros stay zeros."""
    return torch.nn.functional.normalize(rows, dim=-1, eps=torch.finfo(rows.dtype).tiny)
