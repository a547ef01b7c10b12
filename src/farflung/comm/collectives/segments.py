"""What the collectives share: cutting a flat tensor, and summing in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

__all__ = ["Segment", "cut", "sum_in_order"]


@dataclass(frozen=True, slots=True)
class Segment:
    """``length`` elements of a flat tensor from ``start`` on."""

    start: int
    length: int

    def of(self, tensor: Tensor) -> Tensor:
        """The view."""
        return tensor.narrow(0, self.start, self.length)


def cut(numel: int, parts: int, start: int = 0) -> list[Segment]:
    """``parts`` segments that differ in length by at most one element, the longer ones first."""
    base, longer = divmod(numel, parts)
    segments = []
    for index in range(parts):
        length = base + (index < longer)
        segments.append(Segment(start, length))
        start += length
    return segments


def sum_in_order(parts: Sequence[Tensor]) -> Tensor:
    """The sum, first to last, in a fresh tensor."""
    if len(parts) == 1:
        return parts[0].clone()
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total
