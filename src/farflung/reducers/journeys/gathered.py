"""Encoded once, and sent to all."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from farflung.codecs.sparse import accumulate
from farflung.comm.collectives.segments import others
from farflung.reducers.journeys.journey import Exchange, Parcel, both
from farflung.trees import apart
from farflung.types import CodecState, CodingCost, Payload, TensorSpec

__all__ = ["Gathered"]


class Gathered:
    """Encoded once; every rank sends its payload to all, and decodes and adds them in rank order.

    One way and one delay, but traffic that grows with the number of ranks.
    """

    posted = True

    def __init__(self, exchange: Exchange, own: Parcel) -> None:
        self._exchange, self._codec, self._method, self._tensor = exchange, own.codec, own.method, own.tensor
        payload, self.state = exchange.encode(own)
        # Nobody says when all have read it, and the sum is written where the tensor was.
        self._own = apart(payload, own.tensor)
        self._hop = exchange.channel.hops(1)
        for peer in others(exchange.channel):
            exchange.channel.send(Payload((self._own, exchange.side)), peer, self._hop)

    async def finish(self) -> tuple[Tensor, Tensor]:
        """The sums, in rank order whoever was first."""
        channel, step = self._exchange.channel, self._exchange.step
        cost = CodingCost("accumulate", self._method, self._tensor.numel())
        expect = (*map(TensorSpec.of, self._own.tensors()), TensorSpec.of(self._exchange.side))
        self._tensor.zero_()
        side = torch.zeros_like(self._exchange.side)
        for rank in range(channel.size):
            payload, riding = self._own, self._exchange.side
            if rank != channel.rank:
                payload, riding = both(await channel.recv(rank, self._hop, expect), self._tensor.device)
            channel.compute(
                cost,
                partial(accumulate, self._codec, self.state, payload, self._tensor, step=step, count=1),
            )
            side += riding
        return self._tensor, side

    def learn(self, state: CodecState, average: Tensor) -> CodecState:
        """What the codec learns."""
        return self._codec.observe(state, average, step=self._exchange.step)
