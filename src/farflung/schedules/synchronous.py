"""The schedule of plain data-parallel SGD."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from farflung.schedules.fixed import Fixed
from farflung.types import Replace, State, Transfer

__all__ = ["Synchronous"]


@dataclass(frozen=True, slots=True)
class Synchronous(Fixed):
    """Every bucket's gradient starts as soon as it is ready and is due at the same step's optimizer."""

    steps_on: ClassVar[Literal["aggregate", "own"]] = "aggregate"
    what: ClassVar[Literal["gradient", "update", "parameters"]] = "gradient"
    clips: ClassVar[bool] = True
    predicts: ClassVar[bool] = False

    def plan(self, state: State, step: int) -> list[Transfer]:
        """One transfer for each bucket."""
        return [Transfer(bucket, "gradient", due_step=step, merge=Replace()) for bucket in state["buckets"]]
