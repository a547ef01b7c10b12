"""What codecs that learn nothing have alike."""

from __future__ import annotations

from torch import Tensor

from farflung.types import CodecState

__all__ = ["Fixed"]


class Fixed:
    """A codec that learns nothing from what was aggregated."""

    __slots__ = ()

    def observe(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        """Learns nothing."""
        del aggregate, step
        return state
