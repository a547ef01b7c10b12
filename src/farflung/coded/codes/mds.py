"""Maximum distance separable codes over the reals: any K of the blocks determine all partitions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from farflung.coded.codes.code import appended
from farflung.coded.codes.normal import normal_row
from farflung.errors import ConfigError
from farflung.seeding import derive

__all__ = ["MDS"]

_PARITIES = ("gaussian", "cauchy", "vandermonde")
_LARGEST = 1e5
"""Of the last row's next coefficient in a Vandermonde code; up to there decoding matrices have conditions below 1e6."""


@dataclass(frozen=True, slots=True)
class MDS:
    r"""Coefficients none of which is zero, so a coded block needs all partitions.

    With blocks counted from i = 0 and partitions from k = 0:

    * ``gaussian``: :math:`G_{ik}` standard normal; MDS with probability 1, and the best conditioned.
    * ``cauchy``: :math:`G_{ik} = 1 / (i + k + 1)`, nodes :math:`x_i = i`, :math:`y_k = -k - 1`; for few coded blocks:
      at (20, 16) some answer sets have conditions above 1e7.
    * ``vandermonde``: :math:`G_{ik} = (i + 1)^k`, whose nodes are positive and distinct, as the systematic form needs.
      Conditions grow as the powers do, so there are at most R rows, the largest :math:`R \le K` with
      :math:`R^K \le 10^5`: 4 at K = 8, 2 at K = 16, 1 from K = 17 on.

    Args:
      parity: which of them.

    Raises:
      ConfigError: a parity that there is not.

    References: Lee et al. 2015 (arXiv 1512.02673).
    """

    parity: Literal["gaussian", "cauchy", "vandermonde"] = "gaussian"

    def __post_init__(self) -> None:
        if self.parity not in _PARITIES:
            raise ConfigError(f"mds: parity {self.parity!r} must be one of {', '.join(_PARITIES)}")

    def row(self, index: int, partitions: int, seed: int) -> Tensor:
        """See :meth:`farflung.coded.Code.row`.

        Raises:
          ConfigError: the Vandermonde code has no such row.
        """
        columns = np.arange(partitions)
        if self.parity == "gaussian":
            return torch.from_numpy(normal_row(derive(seed, "mds"), index, columns))
        if self.parity == "cauchy":
            return torch.from_numpy(1.0 / (index + columns + 1.0))
        most = self.most(partitions)
        if most is not None and index >= most:
            raise ConfigError(
                f"mds: Vandermonde parity over {partitions} partitions gives {most} coded blocks and no block {index}: "
                "in float64 more could not be decoded. Take parity='gaussian'"
            )
        return torch.from_numpy((index + 1.0) ** columns)

    def most(self, partitions: int) -> int | None:
        """Any number, but for Vandermonde."""
        if self.parity != "vandermonde":
            return None
        return max(r for r in range(1, partitions + 1) if r == 1 or float(r) ** partitions <= _LARGEST)

    def grown(self, row: Tensor, index: int, seed: int, partitions: int) -> Tensor:
        """Never zero there; see :meth:`farflung.coded.Code.grown`."""
        return appended(row, self.row(index, partitions, seed))
