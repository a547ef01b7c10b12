"""All-reduce by owners: each shard of the tensor is sent straight to its owner, summed there, and sent back.

``direct``: every rank owns one shard (reduce-scatter and all-gather without intermediate hops: two one-way delays).
``multi_parameter_server``: half the ranks own the shards. ``parameter_server``: rank 0 owns everything.
"""

from __future__ import annotations

from torch import Tensor

from farflung.comm.collectives.coding import SegmentChannel, with_metadata
from farflung.comm.collectives.segments import cut_segments, list_peers, sum_in_order
from farflung.network import count_pieces
from farflung.types import Channel, Segment, SegmentCoding

__all__ = [
    "count_all_owners",
    "count_half_owners",
    "count_server_owners",
    "cut_shards",
    "direct",
    "multi_parameter_server",
    "parameter_server",
]


def count_all_owners(size: int) -> int:
    """Counts the owners among ``size`` ranks if all own a shard; owners are always the first ranks."""
    return size


def count_half_owners(size: int) -> int:
    """Counts the owners if half the ranks, rounded up, own a shard."""
    return (size + 1) // 2


def count_server_owners(size: int) -> int:
    """Returns 1: with a parameter server, rank 0 owns the whole tensor."""
    del size
    return 1


def cut_shards(numel: int, element_nbytes: int, owners: int) -> list[list[Segment]]:
    """Returns the segments of each owner's shard; all shards have equally many."""
    shards = cut_segments(numel, owners)
    pieces = count_pieces(shards[0].length * element_nbytes)
    return [cut_segments(shard.length, pieces, shard.start) for shard in shards]


async def direct(
    channel: Channel, tensor: Tensor, metadata: Tensor, *, coding: SegmentCoding | None = None
) -> tuple[Tensor, Tensor]:
    """Sums with one shard for every rank: the latency of two one-way delays, the traffic of a ring.

    Args:
      channel: Channel of the exchange.
      tensor: Flat tensor; given away, and overwritten by the sum.
      metadata: A few float64 numbers, summed in rank order.
      coding: Coding of each segment on its way to its owner and back; None for dense segments.

    Returns:
      The sums of tensor and metadata over all ranks, bit-identical on all of them.
    """
    return await _reduce_by_owners(channel, tensor, metadata, count_all_owners(channel.size), coding)


async def parameter_server(
    channel: Channel, tensor: Tensor, metadata: Tensor, *, coding: SegmentCoding | None = None
) -> tuple[Tensor, Tensor]:
    """Sums everything on rank 0, which sends it back; arguments and result as :func:`direct`."""
    return await _reduce_by_owners(channel, tensor, metadata, count_server_owners(channel.size), coding)


async def multi_parameter_server(
    channel: Channel, tensor: Tensor, metadata: Tensor, *, coding: SegmentCoding | None = None
) -> tuple[Tensor, Tensor]:
    """Sums on half the ranks, rounded up, each of which owns a shard; arguments and result as :func:`direct`.

    The number of servers is our choice: with all ranks as servers this is :func:`direct`.
    """
    return await _reduce_by_owners(channel, tensor, metadata, count_half_owners(channel.size), coding)


async def _reduce_by_owners(
    channel: Channel, tensor: Tensor, metadata: Tensor, num_owners: int, coding: SegmentCoding | None
) -> tuple[Tensor, Tensor]:
    rank, size = channel.rank, channel.size
    if size == 1:
        return tensor, metadata
    transfer = SegmentChannel(channel, coding)
    owned = cut_shards(tensor.numel(), tensor.element_size(), num_owners)
    views = [[place.narrow(tensor) for place in shard] for shard in owned]
    pieces = len(owned[0])
    hop, return_hop = channel.reserve_hops(pieces), channel.reserve_hops(pieces)
    everyone_owns = num_owners == size
    peers = list_peers(channel)

    if coding is None:
        for owner in peers:
            if owner < num_owners:
                for piece in range(pieces):
                    channel.post_recv_buffer(owner, return_hop + piece, views[owner][piece])
    for piece in range(pieces):
        for owner in peers:
            if owner < num_owners:
                packed = transfer.pack(views[owner][piece], owned[owner][piece], 1)
                channel.send(with_metadata(packed, metadata if piece == 0 else None), owner, hop + piece)

    total_metadata = metadata
    if rank < num_owners:
        for piece, (piece_view, place) in enumerate(zip(views[rank], owned[rank], strict=True)):
            total, all_metadata = await transfer.sum(piece_view, place, hop + piece, metadata)
            if piece == 0:
                total_metadata = sum_in_order(all_metadata)
            packed = transfer.pack(total, place, size)
            extra = total_metadata if piece == 0 and not everyone_owns else None
            for peer in peers:
                channel.send(with_metadata(packed, extra), peer, return_hop + piece)
            transfer.unpack_into(packed, piece_view, place, size)

    for piece in range(pieces):
        for owner in peers:
            if owner < num_owners:
                target = views[owner][piece]
                packed, extra = await transfer.recv(owner, return_hop + piece, target)
                transfer.unpack_into(packed, target, owned[owner][piece], size)
                total_metadata = total_metadata if extra is None else extra
    return tensor, total_metadata
