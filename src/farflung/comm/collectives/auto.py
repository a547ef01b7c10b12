"""The collective that a run has settled on."""

from __future__ import annotations

from torch import Tensor

from farflung.types import Channel, SegmentCoding

__all__ = ["auto"]


async def auto(
    channel: Channel, tensor: Tensor, side: Tensor, *, coding: SegmentCoding | None = None
) -> tuple[Tensor, Tensor]:
    """The one that :func:`farflung.comm.resolve_collective` has found for tensors of this size when the run was made.

    For sizes that were not known then it is ``direct``.

    With a codec inside, whose errors depend on the way, it is always ``direct``.
    """
    name = "direct" if coding is not None else channel.auto.get(tensor.nbytes, "direct")
    return await channel.collective(name)(channel, tensor, side, coding=coding)
