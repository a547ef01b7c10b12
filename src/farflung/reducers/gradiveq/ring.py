"""Encoded segments around a ring, encoded and decoded while others are on their way."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from farflung.comm.collectives.segments import sum_in_order
from farflung.comm.staging import on_device
from farflung.reducers.gradiveq.segments import Coder, Stretch
from farflung.reducers.journeys import Exchange
from farflung.types import CodingCost, Payload, TensorSpec

__all__ = ["ring"]


async def ring(exchange: Exchange, coder: Coder, method: str, device: torch.device) -> Tensor:
    """Writes the mean in the tensor's place; returns the sum of the sides.

    On a hop of the first half a rank encodes its own segment while the neighbour's partial sum of it is on its way,
    and adds the two; on one of the second half it decodes what it has while the next comes.

    The sides go around in the first half, one on each hop, and are added in rank order; so the sum of the weights is
    there before anything is decoded, which is our choice, since the paper's nodes weigh alike.

    Args:
      exchange: whose side it is.
      coder: of the own tensor, with its equal bases on all ranks.
      method: what the costs of its arithmetic are called by.
      device: of the tensor.

    References: Yu et al. 2018, Algorithm 1; borders on slice borders, at about equal bytes, are our choice.
    """
    channel, side = exchange.channel, exchange.side
    rank, size = channel.rank, channel.size
    after, before = (rank + 1) % size, (rank - 1) % size
    hop = channel.hops(2 * (size - 1))
    places = coder.cut(size)

    def encode(where: Stretch) -> Tensor:
        cost = CodingCost("encode", method, coder.numel(where))
        return channel.compute(cost, partial(coder.encode, where))

    def decode(summed: Tensor, where: Stretch) -> None:
        cost = CodingCost("decode", method, coder.numel(where))
        channel.compute(cost, partial(coder.decode, summed, where, float(sides[0])))

    async def received(where: Stretch, at: int, *more: Tensor) -> list[Tensor]:
        expect = (TensorSpec((coder.sent_numel(where),), coder.dtype), *map(TensorSpec.of, more))
        coded, *rest = (await channel.recv(before, at, expect)).tensors()
        return [*on_device(Payload((coded,)), device).tensors(), *rest]

    riding = {rank: side}
    summed = encode(places[rank])
    for k in range(size - 1):
        sending, receiving = (rank - k) % size, (rank - k - 1) % size
        channel.send(Payload((summed, riding[sending])), after, hop + k)
        own = encode(places[receiving])
        came, riding[receiving] = await received(places[receiving], hop + k, side)
        summed = channel.compute(CodingCost("add", "", own.numel()), partial(torch.add, came, own))

    sides = sum_in_order([riding[each] for each in range(size)])
    hop += size - 1
    for k in range(size - 1):
        complete = (rank + 1 - k) % size
        channel.send(Payload((summed,)), after, hop + k)
        decode(summed, places[complete])
        (summed,) = await received(places[(rank - k) % size], hop + k)
    decode(summed, places[(rank + 2) % size])
    return sides
