"""All-gather as all-reduce in one delay: every rank sends its whole tensor to all others, and all add in rank order."""

from __future__ import annotations

from torch import Tensor

from farflung.comm.collectives.coding import SegmentChannel, with_metadata
from farflung.comm.collectives.segments import cut_segments, list_peers, sum_in_order
from farflung.comm.pool import allocate_like
from farflung.network import count_pieces
from farflung.trees import clone_shared
from farflung.types import Channel, Payload, SegmentCoding

__all__ = ["all_reduce_by_all_gather"]


async def all_reduce_by_all_gather(
    channel: Channel, tensor: Tensor, metadata: Tensor, *, coding: SegmentCoding | None = None
) -> tuple[Tensor, Tensor]:
    """Sums over all ranks by sending every tensor to every rank; the latency is one one-way delay.

    Each rank sends ``n - 1`` tensors instead of ``2 (n - 1) / n``. Two replicas send no more than by ``direct``; many
    do, which pays off for tensors that are dominated by latency. With a codec a tensor is encoded once.

    Arguments and result are those of :func:`farflung.comm.collectives.sharded.direct`.
    """
    if channel.size == 1:
        return tensor, metadata
    transfer = SegmentChannel(channel, coding)
    # The sum is written into the tensor, and nothing tells when all receivers have read it: send a copy.
    source = tensor
    if coding is None:
        channel.charge("copy", tensor.numel())
        source = allocate_like(tensor).copy_(tensor)
    segments = cut_segments(tensor.numel(), count_pieces(tensor.nbytes))
    hop = channel.reserve_hops(len(segments))
    packed = []
    for index, segment in enumerate(segments):
        piece = transfer.pack(segment.narrow(source), segment, 1)
        packed.append(clone_shared(piece, tensor) if isinstance(piece, Payload) else piece)
        for peer in list_peers(channel):
            channel.send(with_metadata(packed[index], metadata if index == 0 else None), peer, hop + index)

    total_metadata = metadata
    for index, segment in enumerate(segments):
        total = segment.narrow(tensor)
        local_part = transfer.unpack(packed[index], total, segment, 1)
        _, all_metadata = await transfer.sum(
            local_part, segment, hop + index, metadata if index == 0 else None, total
        )
        if index == 0:
            total_metadata = sum_in_order(all_metadata)
    return tensor, total_metadata
