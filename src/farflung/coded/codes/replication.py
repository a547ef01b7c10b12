"""Copies of the partitions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.coded.codes.code import appended

__all__ = ["Replication"]


@dataclass(frozen=True, slots=True)
class Replication:
    """Coded block i is a copy of partition i mod K, so (r - 1) K of them make r copies of all."""

    def row(self, index: int, partitions: int, seed: int) -> Tensor:
        del seed
        row = torch.zeros(partitions, dtype=torch.float64)
        row[index % partitions] = 1
        return row

    def most(self, partitions: int) -> int | None:
        del partitions
        return None

    def grown(self, row: Tensor, index: int, seed: int, partitions: int) -> Tensor:
        """Zeros there: a copy stays what it is."""
        del index, seed
        return appended(row, torch.zeros(partitions, dtype=torch.float64))
