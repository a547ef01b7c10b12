"""What the arithmetic of exchanges takes on a device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from farflung.types import CodingCost

__all__ = ["CodingRates", "Points"]

Points: TypeAlias = "tuple[tuple[int, float], ...]"
"""Elements and seconds, by rising number of elements."""


@dataclass(frozen=True, slots=True)
class CodingRates:
    """Seconds that coding and messages take on a device's processor.

    Args:
      operations: measured points of each operation of each method, by ``(operation, method)``; between two sizes
        seconds are interpolated, below the first they stay, above the last they grow with the size.
      message_s: of each message, for the replica that sends it and for each that receives it.
      copy_s_per_byte: of each message's bytes, at both ends.
      encrypt_s_per_byte: besides, where messages are encrypted.
    """

    operations: Mapping[tuple[str, str], Points] = field(default_factory=dict)
    message_s: float = 0.0
    copy_s_per_byte: float = 0.0
    encrypt_s_per_byte: float = 0.0

    def seconds(self, cost: CodingCost) -> float:
        """What one piece of work takes; nothing where it was not measured."""
        points = self.operations.get((cost.operation, cost.method))
        if not points:
            return 0.0
        (smallest, least), (largest, most) = points[0], points[-1]
        if cost.numel <= smallest:
            return least
        if cost.numel >= largest:
            return most * cost.numel / largest
        for (low, low_s), (high, high_s) in pairwise(points):
            if cost.numel <= high:
                return low_s + (high_s - low_s) * (cost.numel - low) / (high - low)
        raise AssertionError("points are sorted")
