"""Ring all-reduce: the least traffic per link, ``2 (n-1)`` one-way delays."""

from __future__ import annotations

from torch import Tensor

from farflung.comm.collectives.coding import SegmentChannel, with_metadata
from farflung.comm.collectives.segments import cut_segments, sum_in_order
from farflung.types import Channel, SegmentCoding

__all__ = ["ring"]


async def ring(
    channel: Channel, tensor: Tensor, metadata: Tensor, *, coding: SegmentCoding | None = None
) -> tuple[Tensor, Tensor]:
    """Sums by reduce-scatter, then all-gather, each in ``n - 1`` hops to the next rank.

    Compression is inside the ring, as in Pipe-SGD: a hop of the first half receives, decodes, adds the local
    segment, encodes and sends; a hop of the second half forwards the encoded bytes. The rank that completes a
    segment keeps the decoded form of its message, so all ranks end bit-identical.

    Arguments and result are those of :func:`farflung.comm.collectives.sharded.direct`; the metadata travels
    with segment 0.

    References: Patarasuk & Yuan 2009; Li et al. 2018 (Pipe-SGD), compression inside AllReduce.
    """
    rank, size = channel.rank, channel.size
    if size == 1:
        return tensor, metadata
    transfer = SegmentChannel(channel, coding)
    hop, gather_hop = channel.reserve_hops(size - 1), channel.reserve_hops(size - 1)
    successor, predecessor = (rank + 1) % size, (rank - 1) % size
    places = cut_segments(tensor.numel(), size)
    segments = [place.narrow(tensor) for place in places]
    extras = {0: metadata} if rank == 0 else {}

    packed = transfer.pack(segments[rank], places[rank], 1)
    for k in range(size - 1):
        sending, receiving = (rank - k) % size, (rank - k - 1) % size
        channel.send(with_metadata(packed, extras.get(sending)), successor, hop + k)
        segment, place = segments[receiving], places[receiving]
        received, partial_metadata = await transfer.recv(predecessor, hop + k, segment)
        if partial_metadata is not None:
            extras[receiving] = partial_metadata + metadata
        partial_sum = transfer.unpack(received, segment, place, k + 1)
        channel.charge("add", place.length)
        packed = transfer.pack(sum_in_order([partial_sum, segment]), place, k + 2)

    complete = (rank + 1) % size
    transfer.unpack_into(packed, segments[complete], places[complete], size)
    for k in range(size - 1):
        sending, receiving = (rank + 1 - k) % size, (rank - k) % size
        channel.send(with_metadata(packed, extras.get(sending)), successor, gather_hop + k)
        target = segments[receiving]
        packed, total_metadata = await transfer.recv(predecessor, gather_hop + k, target)
        if total_metadata is not None:
            extras[receiving] = total_metadata
        transfer.unpack_into(packed, target, places[receiving], size)
    return tensor, extras[0]
