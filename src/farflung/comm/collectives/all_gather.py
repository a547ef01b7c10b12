"""All-gather as all-reduce in one delay: every rank sends its whole tensor to all others, and all add in rank order."""

from __future__ import annotations

from torch import Tensor

from farflung.comm.collectives.coding import Wire, with_side
from farflung.comm.collectives.segments import copied, cut, others, sum_in_order
from farflung.comm.pool import scratch_like
from farflung.network import pieces_of
from farflung.trees import unshared
from farflung.types import Channel, Payload, SegmentCoding

__all__ = ["all_gather"]


async def all_gather(
    channel: Channel, tensor: Tensor, side: Tensor, *, coding: SegmentCoding | None = None
) -> tuple[Tensor, Tensor]:
    """Sums in one one-way delay, with half the messages of :func:`farflung.comm.collectives.sharded.direct`.

    Each rank sends ``n - 1`` tensors instead of ``2 (n - 1) / n``. Two replicas send no more than by ``direct``; many
    do, which pays off for tensors that are dominated by latency. With a codec a tensor is encoded once.

    Arguments and result are those of :func:`farflung.comm.collectives.sharded.direct`.
    """
    if channel.size == 1:
        return tensor, side
    transfer = Wire(channel, coding)
    # The sum is written into the tensor, and nothing tells when all receivers have read it: send a copy.
    source = tensor
    if coding is None:
        source = copied(channel, tensor, scratch_like(tensor))
    segments = cut(tensor.numel(), pieces_of(tensor.nbytes))
    hop = channel.hops(len(segments))
    packed = []
    for index, segment in enumerate(segments):
        piece = transfer.pack(segment.of(source), segment, 1)
        packed.append(unshared(piece, tensor) if isinstance(piece, Payload) else piece)
        for peer in others(channel):
            channel.send(with_side(packed[index], side if index == 0 else None), peer, hop + index)

    total_metadata = side
    for index, segment in enumerate(segments):
        total = segment.of(tensor)
        local_part = transfer.unpack(packed[index], total, segment, 1)
        _, all_metadata = await transfer.sum(
            local_part, segment, hop + index, side if index == 0 else None, total
        )
        if index == 0:
            total_metadata = sum_in_order(all_metadata)
    return tensor, total_metadata
