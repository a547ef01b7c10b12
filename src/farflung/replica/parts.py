"""What a schedule's transfers move: buckets, and fragments of several."""

from __future__ import annotations

from collections.abc import Sequence

from farflung.errors import Unsupported
from farflung.types import Bucket, Part, Placed, Schedule, TensorSpec

__all__ = ["buckets_of", "numbered", "spec_of"]


def buckets_of(part: Part) -> tuple[Bucket, ...]:
    """Those that a part consists of, in its order."""
    return (part,) if isinstance(part, Bucket) else part.buckets


def numbered(schedule: Schedule, buckets: Sequence[Bucket]) -> dict[int, Part]:
    """A schedule's parts, each with a number of its own: buckets come first, then fragments.

    Raises:
      Unsupported: a bucket that no part moves.
    """
    parts = schedule.parts(buckets)
    left = {bucket.index for bucket in buckets} - {b.index for part in parts for b in buckets_of(part)}
    if left:
        raise Unsupported(
            f"schedule {type(schedule).__name__}: no part of it moves bucket {min(left)}, which would train apart"
        )
    return {part.index if isinstance(part, Bucket) else len(buckets) + part.index: part for part in parts}


def spec_of(part: Part) -> TensorSpec:
    """Of a part's flat tensor, with what it is made of.

    Raises:
      Unsupported: a fragment of unlike dtypes.
    """
    buckets = buckets_of(part)
    dtypes = {bucket.spec.dtype for bucket in buckets}
    if len(dtypes) > 1:
        raise Unsupported(
            f"fragment {part.index} holds {' and '.join(sorted(map(str, dtypes)))}: give each type fragments of its own"
        )
    places: list[Placed] = []
    start = 0
    for bucket in buckets:
        places += [Placed(placed.shape, start + placed.start) for placed in bucket.spec.parts]
        start += bucket.spec.numel
    return TensorSpec((start,), dtypes.pop(), tuple(places))
