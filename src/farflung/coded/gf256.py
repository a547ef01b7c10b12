r"""Random linear network coding over GF(2^8) of bytes, by which a raw block is repaired bit for bit.

The field is :math:`GF(2)[x] / (x^8 + x^4 + x^3 + x^2 + 1)` (0x11D), of which :math:`x` is a primitive element.
Addition is exclusive or.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from farflung.noise import uniform_row
from farflung.seeding import derive

__all__ = ["INVERSE", "POLYNOMIAL", "PRODUCT", "Bytes", "Elimination", "encode", "row"]

Bytes = npt.NDArray[np.uint8]
"""Elements of the field: coefficients, or the bytes of a block."""

POLYNOMIAL = 0x11D
"""The field's, by its bits."""


def _tables() -> tuple[Bytes, Bytes]:
    powers = [1]
    for _ in range(254):
        power = powers[-1] << 1
        powers.append(power ^ POLYNOMIAL if power > 255 else power)
    power_of = np.array(powers, dtype=np.uint8)
    logarithm = np.zeros(256, dtype=np.int64)
    logarithm[power_of] = np.arange(255)
    product = power_of[(logarithm[:, None] + logarithm) % 255]
    product[0] = product[:, 0] = 0
    inverse = power_of[-logarithm % 255]
    inverse[0] = 0
    product.setflags(write=False)
    inverse.setflags(write=False)
    return product, inverse


PRODUCT, INVERSE = _tables()
"""The products of all elements, (256, 256), and the inverse of each, (256,), with 0 for that of 0."""


def row(index: int, partitions: int, seed: int) -> Bytes:
    """The coefficients of one coded block: uniform, never all zero.

    Args:
      index: which coded block, counted from 0.
      partitions: how many there are.
      seed: of the code.

    Returns:
      (partitions,).
    """
    columns = np.arange(partitions)
    drawn = (uniform_row(derive(seed, "gf256", attempt), index, columns) for attempt in itertools.count())
    return next(found for one in drawn if (found := (256 * one).astype(np.uint8)).any())


def encode(coefficients: Bytes, blocks: Sequence[Bytes]) -> Bytes:
    """The sum of the blocks times their coefficients.

    Args:
      coefficients: (partitions,).
      blocks: bytes of each partition; shorter ones count as padded with zeros.

    Returns:
      As many bytes as the longest block has.
    """
    total = np.zeros(max(map(len, blocks), default=0), dtype=np.uint8)
    for coefficient, block in zip(coefficients, blocks, strict=True):
        if coefficient:
            total[: len(block)] ^= PRODUCT[coefficient][block]
    return total


class Elimination:
    """Gauss-Jordan elimination, block by block as they come.

    Args:
      partitions: how many there are.
    """

    def __init__(self, partitions: int) -> None:
        self._partitions = partitions
        self._rows: dict[int, tuple[Bytes, Bytes]] = {}

    def add(self, coefficients: Bytes, block: Bytes) -> bool:
        """Takes a block, raw or coded; whether the rank grew.

        Args:
          coefficients: (partitions,); a unit vector for a raw block.
          block: its bytes, as many as all others have.
        """
        for pivot, (by, of) in self._rows.items():
            if factor := coefficients[pivot]:
                coefficients, block = coefficients ^ PRODUCT[factor][by], block ^ PRODUCT[factor][of]
        if not coefficients.any():
            return False
        pivot = int(coefficients.nonzero()[0][0])
        scale = PRODUCT[INVERSE[coefficients[pivot]]]
        coefficients, block = scale[coefficients], scale[block]
        for other, (by, of) in self._rows.items():
            if factor := by[pivot]:
                self._rows[other] = by ^ PRODUCT[factor][coefficients], of ^ PRODUCT[factor][block]
        self._rows[pivot] = coefficients, block
        return True

    @property
    def complete(self) -> bool:
        """Whether all partitions are determined."""
        return len(self._rows) == self._partitions

    def blocks(self) -> dict[int, Bytes]:
        """The partitions determined so far, each as long as the blocks that came."""
        return {pivot: block for pivot, (by, block) in sorted(self._rows.items()) if by.sum(dtype=int) == 1}
