"""What schedules that adapt to nothing have alike."""

from __future__ import annotations

from collections.abc import Sequence

from farflung.types import Bucket, SharedStats, State

__all__ = ["Fixed"]


class Fixed:
    """A schedule whose plan hangs on nothing but the step."""

    __slots__ = ()

    def init(self, buckets: Sequence[Bucket]) -> State:
        """The buckets themselves."""
        return {"buckets": tuple(buckets)}

    def asks(self, state: State, step: int) -> bool:
        """Never."""
        del state, step
        return False

    def observe(self, state: State, stats: SharedStats) -> State:
        """Adapts to nothing."""
        del stats
        return state
