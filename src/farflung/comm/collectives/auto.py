"""The collective that is fastest on the network at hand."""

from __future__ import annotations

from torch import Tensor

from farflung.comm.collectives.all_gather import all_gather
from farflung.comm.collectives.coding import Coding
from farflung.comm.collectives.sharded import direct, multi_parameter_server, parameter_server
from farflung.types import Channel

__all__ = ["auto"]

CHOICES = {
    "direct": direct,
    "all_gather": all_gather,
    "multi_parameter_server": multi_parameter_server,
    "parameter_server": parameter_server,
}
"""All of them add in rank order, so that the choice changes no bit; a ring does not."""
WORTH_A_DELAY_NBYTES = 1 << 16
"""How much more a rank may send to save one delay, where the network is not known; our choice."""


async def auto(
    channel: Channel, tensor: Tensor, side: Tensor, *, coding: Coding | None = None
) -> tuple[Tensor, Tensor]:
    """The one that is fastest for a tensor of this size.

    In virtual time the latency-bandwidth model is asked about the profile: :func:`farflung.network.choose`. Real
    processes have no profile, and every rank must choose alike: they take ``all_gather`` where it costs little
    traffic, so always between two, and ``direct`` for the rest, since no other takes fewer delays, and it sends no
    more than a ring. Others are faster only where replicas share a medium or a way out of their site; ``all_gather``
    is not asked about where it costs more, for every rank adds everybody's whole tensor. So parameters
    never depend on the choice, but the bytes of a simulation may differ from those of the real run, unless the
    collective is named. With a codec inside, whose errors depend on the way, it is always ``direct``.
    """
    if coding is not None:
        return await direct(channel, tensor, side, coding=coding)
    size = channel.size
    more = (size - 1) * (size - 2) * tensor.nbytes // size
    usual = "all_gather" if more <= WORTH_A_DELAY_NBYTES else "direct"
    names = (usual, *(name for name in CHOICES if name not in (usual, "all_gather")))
    return await CHOICES[channel.fastest(names, tensor.nbytes, side.nbytes)](channel, tensor, side)
