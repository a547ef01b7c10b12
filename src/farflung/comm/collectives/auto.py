"""The collective that is fastest on the network at hand."""

from __future__ import annotations

from torch import Tensor

from farflung.comm.collectives.ring import ring
from farflung.comm.collectives.sharded import direct, multi_parameter_server, parameter_server
from farflung.types import Channel, Codec

__all__ = ["auto"]

CHOICES = {
    "direct": direct,
    "ring": ring,
    "multi_parameter_server": multi_parameter_server,
    "parameter_server": parameter_server,
}


async def auto(
    channel: Channel, tensor: Tensor, side: Tensor, *, codec: Codec | None = None, step: int = 0
) -> tuple[Tensor, Tensor]:
    """The one that :func:`farflung.network.choose` names for a tensor of this size; else as :func:`direct`.

    In virtual time the latency-bandwidth model is asked about the profile. Real processes have no profile, and every
    rank must choose alike, so they take ``direct``: no other takes fewer delays, and it sends no more than a ring.
    Others are faster only where replicas share a medium or a way out of their site. A run that is to end with the
    bits of its simulation names the collective instead. The dense size decides, whatever a codec makes of it: our
    choice.
    """
    chosen = CHOICES[channel.fastest(tuple(CHOICES), tensor.nbytes, side.nbytes)]
    return await chosen(channel, tensor, side, codec=codec, step=step)
