"""What a code is: the coefficients of each coded block."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Code", "appended"]


class Code(Protocol):
    r"""Coefficients of the coded blocks :math:`\tilde X_j = \sum_k G_{jk} X_k`, as settings alone.

    The raw blocks are rows of their own, the unit vectors, so every code is systematic. A row is a pure function of the
    arguments: a device draws its own one, and whoever knows the seed knows all of them.
    """

    def row(self, index: int, partitions: int, seed: int) -> Tensor:
        """The coefficients of one coded block; never all zero.

        Args:
          index: which coded block, counted from 0.
          partitions: how many there are, K.
          seed: of the whole code.

        Returns:
          (partitions,), float64.

        Raises:
          ConfigError: the code has no such block.
        """
        ...

    def most(self, partitions: int) -> int | None:
        """How many coded blocks there can be over so many partitions; ``None``: any number."""
        ...

    def grown(self, row: Tensor, index: int, seed: int, partitions: int) -> Tensor:
        """A row that exists, with coefficients for the partitions that have joined since; what it has stays.

        Args:
          row: (held,), as it was drawn or made otherwise.
          index: which coded block it is of.
          seed: of the whole code.
          partitions: how many there are; at least ``held``.

        Returns:
          (partitions,), float64. A coefficient of 0 means that the block needs nothing of that partition.

        Raises:
          ConfigError: the code has no such block over so many partitions.
        """
        ...


def appended(row: Tensor, longer: Tensor) -> Tensor:
    """``row``, and after it what ``longer`` has beyond its length."""
    return torch.cat([row, longer[len(row) :]])
