"""Units, which exchanges move: a bucket, or a fragment of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from farflung.engine.buckets import GradientBucket, GradientBuckets
from farflung.errors import Unsupported
from farflung.types import Bucket, Part, Placed, Schedule, StateSlot, TensorSpec

if TYPE_CHECKING:
    from farflung.engine.metadata import StepMetadata

__all__ = ["Places", "Unit", "enumerate_parts", "spec_of"]

Places = tuple[int, ...]
"""Parameters of a unit, or of a bucket, counted in its order; ascending."""


@dataclass(slots=True, eq=False)
class Unit:
    """A part of the model that exchanges move, for a whole run.

    Args:
      number: equal on all ranks.
      part: as the schedule names it.
      buckets: of the unit, in order.
      slot: the reducer's state.
      steps: metadata of the steps since the last exchange.
    """

    number: int
    part: Part
    buckets: tuple[GradientBucket, ...]
    slot: StateSlot
    steps: list[StepMetadata] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Device of all its buckets."""
        return self.buckets[0].gradient.device

    @property
    def absent(self) -> Places:
        """Parameters without a gradient in the last backward pass."""
        if not any(bucket.absent for bucket in self.buckets):
            return ()
        absent: list[int] = []
        first = 0
        for bucket in self.buckets:
            absent += (first + place for place in bucket.absent)
            first += len(bucket.parameters)
        return tuple(absent)

    @staticmethod
    def make(number: int, part: Part, buckets: GradientBuckets, slot: StateSlot) -> Unit:
        """Makes the unit of a part.

        Raises:
          Unsupported: a fragment on several devices.
        """
        unit = Unit(number, part, tuple(buckets[bucket.index] for bucket in part.buckets), slot)
        devices = sorted({str(bucket.gradient.device) for bucket in unit.buckets})
        if len(devices) > 1:
            raise Unsupported(
                f"fragment {part.index} holds parameters on {' and '.join(devices)}: choose a schedule without "
                "fragments, or keep the model on one device"
            )
        return unit


def enumerate_parts(schedule: Schedule, buckets: Sequence[Bucket]) -> dict[int, Part]:
    """Returns a schedule's parts by number: buckets come first, then fragments.

    Raises:
      Unsupported: a bucket that no part moves.
    """
    parts = schedule.parts(buckets)
    missing = {bucket.index for bucket in buckets} - {b.index for part in parts for b in part.buckets}
    if missing:
        raise Unsupported(
            f"schedule {type(schedule).__name__}: no part of it moves bucket {min(missing)}, which would train apart"
        )
    return {part.index if isinstance(part, Bucket) else len(buckets) + part.index: part for part in parts}


def spec_of(part: Part) -> TensorSpec:
    """Returns the spec of a part's flat tensor, with those of its parameters.

    Raises:
      Unsupported: a fragment of several dtypes.
    """
    dtypes = {bucket.spec.dtype for bucket in part.buckets}
    if len(dtypes) > 1:
        raise Unsupported(
            f"fragment {part.index} holds {' and '.join(sorted(map(str, dtypes)))}: give each type fragments of its own"
        )
    places: list[Placed] = []
    start = 0
    for bucket in part.buckets:
        places += [Placed(placed.shape, start + placed.start) for placed in bucket.spec.parts]
        start += bucket.spec.numel
    return TensorSpec((start,), dtypes.pop(), tuple(places))
