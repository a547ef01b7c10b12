"""The collective that a run has settled on."""

from __future__ import annotations

from torch import Tensor

from farflung.types import Channel, SegmentCoding

__all__ = ["auto"]


async def auto(
    channel: Channel, tensor: Tensor, side: Tensor, *, coding: SegmentCoding | None = None
) -> tuple[Tensor, Tensor]:
    """The one that :func:`farflung.comm.resolve_collective` has found for this run, and ``direct`` before.

    With a codec inside, whose errors depend on the way, it is always ``direct``.
    """
    name = channel.auto if coding is None else "direct"
    return await channel.collective(name)(channel, tensor, side, coding=coding)
