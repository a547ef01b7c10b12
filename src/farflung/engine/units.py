"""States of sync units; each exchange moves a bucket, or a fragment of several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from farflung.engine.buckets import GradientBucket, GradientBuckets
from farflung.errors import Unsupported
from farflung.types import Bucket, ParameterSpan, Schedule, StateSlot, SyncUnit, TensorSpec

if TYPE_CHECKING:
    from farflung.engine.metadata import StepMetadata

__all__ = ["Places", "UnitState", "build_spec", "enumerate_units"]

Places = tuple[int, ...]
"""Indices of parameters in a unit or bucket, ascending."""


@dataclass(slots=True, eq=False)
class UnitState:
    """State of a sync unit for a whole run.

    Args:
      number: Number of the unit, equal on all ranks.
      sync_unit: Bucket or fragment of the schedule.
      buckets: Buckets of the unit, in order.
      slot: State of the reducer.
      steps: Metadata of the steps since the last exchange.
    """

    number: int
    sync_unit: SyncUnit
    buckets: tuple[GradientBucket, ...]
    slot: StateSlot
    steps: list[StepMetadata] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        """Device of all its buckets."""
        return self.buckets[0].gradient.device

    @property
    def zero_places(self) -> Places:
        """Parameters without a gradient in the last backward pass."""
        if not any(bucket.zero_places for bucket in self.buckets):
            return ()
        zero_places: list[int] = []
        first = 0
        for bucket in self.buckets:
            zero_places += (first + place for place in bucket.zero_places)
            first += len(bucket.parameters)
        return tuple(zero_places)

    @staticmethod
    def build(number: int, sync_unit: SyncUnit, buckets: GradientBuckets, slot: StateSlot) -> UnitState:
        """Builds the state of a sync unit.

        Raises:
          Unsupported: a fragment is on several devices.
        """
        unit = UnitState(
            number, sync_unit, tuple(buckets[bucket.index] for bucket in sync_unit.buckets), slot
        )
        devices = sorted({str(bucket.gradient.device) for bucket in unit.buckets})
        if len(devices) > 1:
            raise Unsupported(
                f"fragment {sync_unit.index} holds parameters on {' and '.join(devices)}: choose a schedule without "
                "fragments, or keep the model on one device"
            )
        return unit


def enumerate_units(schedule: Schedule, buckets: Sequence[Bucket]) -> dict[int, SyncUnit]:
    """Returns a schedule's units by number: buckets come first, then fragments.

    Raises:
      Unsupported: no unit contains a bucket.
    """
    sync_units = schedule.build_units(buckets)
    missing = {bucket.index for bucket in buckets} - {b.index for unit in sync_units for b in unit.buckets}
    if missing:
        raise Unsupported(
            f"schedule {type(schedule).__name__}: none of its units contains bucket {min(missing)}, which would train "
            "apart"
        )
    return {
        unit.index if isinstance(unit, Bucket) else len(buckets) + unit.index: unit for unit in sync_units
    }


def build_spec(sync_unit: SyncUnit) -> TensorSpec:
    """Returns the spec of a unit's flat tensor, with those of its parameters.

    Raises:
      Unsupported: a fragment has several dtypes.
    """
    dtypes = {bucket.spec.dtype for bucket in sync_unit.buckets}
    if len(dtypes) > 1:
        raise Unsupported(
            f"fragment {sync_unit.index} holds {' and '.join(sorted(map(str, dtypes)))}: give each type "
            f"fragments of its own"
        )
    spans: list[ParameterSpan] = []
    start = 0
    for bucket in sync_unit.buckets:
        spans += [ParameterSpan(span.shape, start + span.start) for span in bucket.spec.spans]
        start += bucket.spec.numel
    return TensorSpec((start,), dtypes.pop(), tuple(spans))
