"""Encoded to the owner of each shard, summed there, encoded again to all."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from farflung.codecs import ErrorFeedback
from farflung.codecs.error_feedback import left_over, with_residual
from farflung.comm import Coding
from farflung.comm.collectives.coding import Charged
from farflung.comm.collectives.segments import copied, cut, others, sum_in_order, summed
from farflung.comm.staging import on_device
from farflung.reducers.journeys.journey import Exchange, Parcel, both, unwrapped
from farflung.trees import apart
from farflung.types import CodecState, CodingCost, Payload, Segment, TensorSpec

__all__ = ["TwoPhases"]


class TwoPhases:
    """A reduce-scatter of payloads to the shards' owners, and an all-gather of payloads of the sums.

    Two delays, and traffic that does not grow with the number of ranks; each number is encoded twice. With error
    feedback the owner adds what the second encoding left out to its own residual, so that nothing is lost. The
    residual is of the whole tensor, so the number of ranks may change.

    References: Tang et al. 2019, DoubleSqueeze, which keeps a second residual at the server; one at its owner's
    other residual is our choice.
    """

    posted = True

    def __init__(self, exchange: Exchange, own: Parcel) -> None:
        channel, tensor, state = exchange.channel, own.tensor, own.state
        self._exchange, self._tensor = exchange, tensor
        inner, _ = unwrapped(own.codec, state)
        self._coding = Charged(channel, Coding(inner, own.seeds, exchange.step, method=own.method))
        self._segments = cut(tensor.numel(), channel.size)
        self._keeps, self._left = isinstance(own.codec, ErrorFeedback), tensor[:0]
        wanted = tensor
        if self._keeps:
            wanted = summed(channel, [tensor, state.local["residual"].to(tensor.device)])
        payloads = [
            apart(self._coding.encode(segment.of(wanted), segment, 1), wanted) for segment in self._segments
        ]
        self._own = payloads[channel.rank]
        self._hop = channel.hops(2)
        for owner in others(channel):
            channel.send(Payload((payloads[owner], exchange.side)), owner, self._hop)
        self.state = state
        if self._keeps:
            sent = [
                self._decode(payload, segment, 1)
                for payload, segment in zip(payloads, self._segments, strict=True)
            ]
            cost = CodingCost("subtract", "", tensor.numel())
            left = channel.compute(cost, lambda: left_over(wanted, torch.cat(sent)))
            self.state = with_residual(state, left)

    async def finish(self) -> tuple[Tensor, Tensor]:
        """The sums, the own shard's made here."""
        channel = self._exchange.channel
        rank, size, own = channel.rank, channel.size, self._segments[channel.rank]
        expect = (*map(TensorSpec.of, self._own.tensors()), TensorSpec.of(self._exchange.side))
        parts, sides = [], []
        for peer in range(size):
            payload, side = self._own, self._exchange.side
            if peer != rank:
                payload, side = both(await channel.recv(peer, self._hop, expect), self._tensor.device)
            parts.append(self._decode(payload, own, 1))
            sides.append(side)
        total = summed(channel, parts)
        packed = self._coding.encode(total, own, size)
        for peer in others(channel):
            channel.send(packed, peer, self._hop + 1)
        for owner, segment in enumerate(self._segments):
            payload = packed
            if owner != rank:
                payload = on_device(await channel.recv(owner, self._hop + 1), self._tensor.device)
            copied(channel, self._decode(payload, segment, size), segment.of(self._tensor))
        if self._keeps:
            cost = CodingCost("subtract", "", own.length)
            self._left = channel.compute(cost, partial(left_over, total, own.of(self._tensor), packed))
        return self._tensor, sum_in_order(sides)

    def learn(self, state: CodecState, average: Tensor) -> CodecState:
        """The owner keeps what the second encoding left out."""
        del average
        if not self._keeps:
            return state
        residual = state.local["residual"].clone()
        self._segments[self._exchange.channel.rank].of(residual).add_(self._left)
        return with_residual(state, residual)

    def _decode(self, payload: Payload, segment: Segment, count: int) -> Tensor:
        return self._coding.decode(payload, TensorSpec((segment.length,), self._tensor.dtype), segment, count)
