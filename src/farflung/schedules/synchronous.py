"""The schedule of plain data-parallel SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from farflung.schedules.fixed import Fixed
from farflung.types import Merge, Part, Replace, State, Transfer

__all__ = ["Synchronous"]


@dataclass(frozen=True, slots=True)
class Synchronous(Fixed):
    """Every bucket's gradient starts as soon as it is ready and is due at the same step's optimizer."""

    merges: ClassVar[tuple[Merge, ...]] = (Replace(),)

    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        """One transfer for each bucket."""
        del state
        return [Transfer(part, step, Replace()) for part in parts]
