"""What schedules that adapt to nothing have alike."""

from __future__ import annotations

from collections.abc import Sequence

from farflung.types import Bucket, Part, SharedStats, State

__all__ = ["Fixed"]


class Fixed:
    """A schedule that moves every bucket by itself, and whose plan hangs on nothing but the step."""

    __slots__ = ()

    @property
    def late(self) -> bool:
        """Never, unless overridden."""
        return False

    def parts(self, buckets: Sequence[Bucket]) -> Sequence[Part]:
        """The buckets themselves."""
        return buckets

    def init(self) -> State:
        """None."""
        return {}

    def asks(self, state: State, step: int) -> bool:
        """Never."""
        del state, step
        return False

    def observe(self, state: State, stats: SharedStats) -> State:
        """Adapts to nothing."""
        del stats
        return state
