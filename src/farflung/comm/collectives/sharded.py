"""All-reduce by owners: each shard of the tensor travels straight to its owner, is summed there, and comes back.

``direct``: every rank owns one shard (reduce-scatter and all-gather without hops in between: two one-way delays in
all). ``multi_parameter_server``: half the ranks own the shards. ``parameter_server``: rank 0 owns everything.
"""

from __future__ import annotations

from torch import Tensor

from farflung.comm.collectives.coding import Wire, with_side
from farflung.comm.collectives.segments import cut, others, sum_in_order
from farflung.network import pieces_of
from farflung.types import Channel, Segment, SegmentCoding

__all__ = [
    "all_own",
    "direct",
    "half_own",
    "multi_parameter_server",
    "one_owns",
    "parameter_server",
    "shards_of",
]


def all_own(size: int) -> int:
    """How many of ``size`` ranks own a shard, always the first ones: all."""
    return size


def half_own(size: int) -> int:
    """Half, rounded up; see :func:`all_own`."""
    return (size + 1) // 2


def one_owns(size: int) -> int:
    """Rank 0 alone; see :func:`all_own`."""
    del size
    return 1


def shards_of(numel: int, element_nbytes: int, owners: int) -> list[list[Segment]]:
    """Each owner's shard, in pieces; all shards have as many."""
    shards = cut(numel, owners)
    pieces = pieces_of(shards[0].length * element_nbytes)
    return [cut(shard.length, pieces, shard.start) for shard in shards]


async def direct(
    channel: Channel, tensor: Tensor, side: Tensor, *, coding: SegmentCoding | None = None
) -> tuple[Tensor, Tensor]:
    """Every rank owns one shard: the latency of two one-way delays, the traffic of a ring.

    Args:
      channel: the exchange's.
      tensor: flat; given away, and overwritten by the sum.
      side: a few float64 numbers, summed beside it in rank order.
      coding: how each segment is encoded on its way to its owner, and on its way back; ``None``: not at all.

    Returns:
      The sums of tensor and side over all ranks, bit-identical on all of them.
    """
    return await _by_owners(channel, tensor, side, all_own(channel.size), coding)


async def parameter_server(
    channel: Channel, tensor: Tensor, side: Tensor, *, coding: SegmentCoding | None = None
) -> tuple[Tensor, Tensor]:
    """Rank 0 sums everything and sends it back; arguments and result as :func:`direct`."""
    return await _by_owners(channel, tensor, side, one_owns(channel.size), coding)


async def multi_parameter_server(
    channel: Channel, tensor: Tensor, side: Tensor, *, coding: SegmentCoding | None = None
) -> tuple[Tensor, Tensor]:
    """Half the ranks, rounded up, own a shard each; arguments and result as :func:`direct`.

    The number of servers is our choice: with all ranks as servers this is :func:`direct`.
    """
    return await _by_owners(channel, tensor, side, half_own(channel.size), coding)


async def _by_owners(
    channel: Channel, tensor: Tensor, side: Tensor, owners: int, coding: SegmentCoding | None
) -> tuple[Tensor, Tensor]:
    rank, size = channel.rank, channel.size
    if size == 1:
        return tensor, side
    wire = Wire(channel, coding)
    owned = shards_of(tensor.numel(), tensor.element_size(), owners)
    views = [[place.of(tensor) for place in shard] for shard in owned]
    pieces = len(owned[0])
    hop = channel.hops(2 * pieces)
    everyone_owns = owners == size
    peers = others(channel)

    if coding is None:
        for owner in peers:
            if owner < owners:
                for piece in range(pieces):
                    channel.land(owner, hop + 2 * piece + 1, views[owner][piece])
    for piece in range(pieces):
        for owner in peers:
            if owner < owners:
                packed = wire.pack(views[owner][piece], owned[owner][piece], 1)
                channel.send(with_side(packed, side if piece == 0 else None), owner, hop + 2 * piece)

    total_side = side
    if rank < owners:
        for piece, (own, place) in enumerate(zip(views[rank], owned[rank], strict=True)):
            total, sides = await wire.sum(own, place, hop + 2 * piece, side)
            if piece == 0:
                total_side = sum_in_order(sides)
            packed = wire.pack(total, place, size)
            riding = total_side if piece == 0 and not everyone_owns else None
            for peer in peers:
                channel.send(with_side(packed, riding), peer, hop + 2 * piece + 1)
            wire.put(packed, own, place, size)

    for piece in range(pieces):
        for owner in peers:
            if owner < owners:
                target = views[owner][piece]
                packed, riding = await wire.recv(owner, hop + 2 * piece + 1, target)
                wire.put(packed, target, owned[owner][piece], size)
                total_side = total_side if riding is None else riding
    return tensor, total_side
