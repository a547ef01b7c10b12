"""The schedule of plain data-parallel SGD."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from farflung.types import Bucket, Replace, SharedStats, State, Transfer

__all__ = ["Synchronous"]


@dataclass(frozen=True, slots=True)
class Synchronous:
    """Every bucket's gradient starts as soon as it is ready and is due at the same step's optimizer."""

    steps_on: ClassVar[Literal["aggregate", "own"]] = "aggregate"
    what: ClassVar[Literal["gradient", "update", "parameters"]] = "gradient"
    clips: ClassVar[bool] = True
    predicts: ClassVar[bool] = False

    def init(self, buckets: Sequence[Bucket]) -> State:
        """The buckets themselves."""
        return {"buckets": tuple(buckets)}

    def plan(self, state: State, step: int) -> list[Transfer]:
        """One transfer for each bucket."""
        return [Transfer(bucket, "gradient", due_step=step, merge=Replace()) for bucket in state["buckets"]]

    def asks(self, state: State, step: int) -> bool:
        """Never."""
        del state, step
        return False

    def observe(self, state: State, stats: SharedStats) -> State:
        """Adapts to nothing."""
        del stats
        return state
