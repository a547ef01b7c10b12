"""Maximum distance separable codes over the reals: any K of the blocks determine all partitions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from farflung.coded.codes.code import appended
from farflung.coded.codes.normal import normal_row
from farflung.seeding import derive

__all__ = ["MDS"]


@dataclass(frozen=True, slots=True)
class MDS:
    r"""Coefficients that are standard normal, so a coded block needs all partitions; MDS with probability 1.

    References: Lee et al. 2015 (arXiv 1512.02673).
    """

    def row(self, index: int, partitions: int, seed: int) -> Tensor:
        return torch.from_numpy(normal_row(derive(seed, "mds"), index, np.arange(partitions)))

    def most(self, partitions: int) -> int | None:
        del partitions
        return None

    def grown(self, row: Tensor, index: int, seed: int, partitions: int) -> Tensor:
        return appended(row, self.row(index, partitions, seed))
