"""Plan and outcome of one training step: transfers that start at it, and results that are due."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from farflung.engine.flight import Flight
from farflung.engine.metadata import ReducedMetadata, StepMetadata
from farflung.types import ReduceResult, SharedStats, Transfer

__all__ = ["Arrival", "StepOutcome", "StepPlan"]


class Arrival(NamedTuple):
    """Exchange with its result."""

    flight: Flight
    result: ReduceResult
    metadata: ReducedMetadata


@dataclass(slots=True)
class StepOutcome:
    """Outcome of the exchanges that were due at a step.

    Args:
      num_nonfinite: Number of ranks with a non-finite loss, which contributed nothing.
      stats: Statistics of the last step whose exchange was due; ``None`` if none was.
      num_exhausted: Number of ranks that had run out of data at that step.
      sums: Sums over all ranks of the numbers that extensions added to the metadata, by name.
    """

    num_nonfinite: int = 0
    stats: SharedStats | None = None
    num_exhausted: int = 0
    sums: dict[str, float] = field(default_factory=dict)


class StepPlan:
    """Transfers of one step in the planned order, which is equal on all ranks.

    Args:
      step: Number of the step.
      metadata: Metadata of this rank.
      transfers: Transfers that start at the step.
      learning_rate: Learning rate at its beginning.
      outcome: Outcome of buckets that were merged since the last step.
    """

    def __init__(
        self,
        step: int,
        metadata: StepMetadata,
        transfers: Sequence[Transfer],
        learning_rate: float | None,
        outcome: StepOutcome,
    ) -> None:
        self.step, self.metadata, self.learning_rate, self.outcome = step, metadata, learning_rate, outcome
        self.num_unlaunched = len(transfers)
        """Number of transfers not launched yet."""
        self.has_launched = False
        self._gradients = deque(
            transfer for transfer in transfers if transfer.merge.average_target == "gradient"
        )
        self._updates = [transfer for transfer in transfers if transfer.merge.average_target != "gradient"]
        self.has_gradients = bool(self._gradients)
        """True if gradients leave in the step's backward pass."""
        self._full_buckets: set[int] = set()
        """Buckets that have filled."""

    def fill(self, index: int) -> Iterator[Transfer]:
        """Marks a bucket as full; yields the gradient transfers that can start."""
        self._full_buckets.add(index)
        while self._gradients and self._full_buckets.issuperset(
            b.index for b in self._gradients[0].unit.buckets
        ):
            yield self._gradients.popleft()

    def take_updates(self) -> list[Transfer]:
        """Removes and returns the transfers that start after the optimizer step."""
        updates, self._updates = self._updates, []
        return updates
