"""What the arithmetic of exchanges takes on a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeAlias

from farflung.errors import ConfigError
from farflung.types import CodingCost

__all__ = ["CodingRates", "Points", "check_seconds"]

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

    Raises:
      ConfigError: sizes that do not rise, or seconds out of their range; begins with its name.
    """

    operations: Mapping[tuple[str, str], Points] = field(default_factory=dict, hash=False)
    message_s: float = 0.0
    copy_s_per_byte: float = 0.0
    encrypt_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        for points in self.operations.values():
            sizes, seconds = [numel for numel, _ in points], [one for _, one in points]
            if not sizes or sizes[0] < 1 or any(low >= high for low, high in pairwise(sizes)):
                raise ConfigError(
                    f"numel = {sizes}: must be whole numbers above 0, each above the one before"
                )
            if not all(0 < one < math.inf for one in seconds):
                raise ConfigError(f"seconds = {seconds}: each must be above 0")
        for name in ("message_s", "copy_s_per_byte", "encrypt_s_per_byte"):
            check_seconds(name, getattr(self, name))

    def scaled(self, coding: float, messages: float) -> CodingRates:
        """Those of another device.

        Args:
          coding: how many times as long its arithmetic takes.
          messages: how many times as long its messages take.
        """
        operations = {
            key: tuple((numel, seconds * coding) for numel, seconds in points)
            for key, points in self.operations.items()
        }
        fixed = (self.message_s, self.copy_s_per_byte, self.encrypt_s_per_byte)
        return CodingRates(operations, *(seconds * messages for seconds in fixed))

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


def check_seconds(name: str, seconds: float) -> None:
    """A time that passes.

    Raises:
      ConfigError: below 0, or infinite.
    """
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ConfigError(f"{name} = {seconds}: must be a number of seconds, 0 or more")
