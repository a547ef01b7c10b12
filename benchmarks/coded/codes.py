"""Codes to compare with: independent masks, and copies."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farflung.coded.codes import draw_normal_row
from farflung.noise import draw_uniform_array
from farflung.seeding import derive_seed

__all__ = ["LAWS", "REPLICATION", "Masked", "Replication"]


@dataclass(frozen=True, slots=True)
class Masked:
    """RLNC with independent masks: each coefficient is not zero with probability ``density``.

    Args:
      values: whether coefficients are standard normal; otherwise they are 1.
      density: the probability.
    """

    values: bool = True
    density: float = 0.5

    def draw_row(self, index: int, partitions: int, seed: int) -> Tensor:
        """Draws a row, as :meth:`farflung.coded.Code.draw_row`."""
        columns = np.arange(partitions)
        for attempt in itertools.count():
            mask = (
                draw_uniform_array(derive_seed(seed, "rlnc", "mask", attempt), index, columns) < self.density
            )
            if mask.any():
                break
        values = draw_normal_row(derive_seed(seed, "rlnc", "values", attempt), index, columns)
        return torch.from_numpy(np.where(mask, values if self.values else 1.0, 0.0))


@dataclass(frozen=True, slots=True)
class Replication:
    """Coded block i is a copy of partition i mod K, so (r - 1) K of them make r copies of all."""

    def draw_row(self, index: int, partitions: int, seed: int) -> Tensor:
        """Gives a unit vector."""
        del seed
        row = torch.zeros(partitions, dtype=torch.float64)
        row[index % partitions] = 1
        return row


LAWS = {
    "balanced": "rlnc",
    "binary": "benchmarks.coded.codes:Masked(values=False)",
    "masked": "benchmarks.coded.codes:Masked",
}
"""Laws of coefficients of RLNC, as text."""
REPLICATION = "benchmarks.coded.codes:Replication"
