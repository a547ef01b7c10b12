"""The collective that a run has settled on."""

from __future__ import annotations

from collections.abc import Awaitable

from torch import Tensor

from farflung.types import Channel, SegmentCoding

__all__ = ["auto", "usual_collective"]

WORTH_A_DELAY_NBYTES = 1 << 16
"""How much more a rank may send to save one delay, our choice; where the network is not known nothing else counts."""


def usual_collective(nbytes: int, size: int) -> str:
    """``all_gather`` where it sends at most 64 KiB more than ``direct``, always so between two, and else ``direct``.

    No other takes fewer delays, and ``direct`` sends no more than a ring.

    Args:
      nbytes: of the tensor.
      size: number of replicas.
    """
    more = (size - 1) * (size - 2) * nbytes // size
    return "all_gather" if more <= WORTH_A_DELAY_NBYTES else "direct"


def auto(
    channel: Channel, tensor: Tensor, side: Tensor, *, coding: SegmentCoding | None = None
) -> Awaitable[tuple[Tensor, Tensor]]:
    """The one that :func:`farflung.comm.resolve_collective` has found for tensors of this size when the run was made.

    For sizes that were not known then it is :func:`usual_collective`. With a codec inside, whose errors depend on the
    way, it is always ``direct``.
    """
    name = "direct"
    if coding is None:
        name = channel.auto.get(tensor.nbytes) or usual_collective(tensor.nbytes, channel.size)
    return channel.collective(name)(channel, tensor, side, coding=coding)
