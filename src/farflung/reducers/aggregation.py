"""The way of one encoded tensor over the replicas: summed dense, gathered, encoded on hops, or in two phases."""

from __future__ import annotations

from collections.abc import Awaitable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from farflung.codecs import ErrorFeedback
from farflung.codecs.base import Transformed, accumulate
from farflung.codecs.feedback import inner_state, left_over, with_residual
from farflung.comm import Coding
from farflung.comm.collectives.coding import Charged
from farflung.comm.collectives.segments import copied, cut, others, sum_in_order, summed
from farflung.comm.staging import on_device
from farflung.errors import Unsupported
from farflung.reducers.base import limited
from farflung.trees import only_seeds, rebuilt, unshared
from farflung.types import Channel, Codec, CodecState, CodingCost, Payload, Seeds, Segment, TensorSpec

__all__ = [
    "AggregationPath",
    "Exchange",
    "Gathered",
    "Hops",
    "Linear",
    "Parcel",
    "Summed",
    "TwoPhases",
    "both",
    "check_cut",
    "unwrapped",
]


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one rank gives to a path.

    Args:
      codec: encodes it.
      method: what the costs of its encodings are called by.
      state: of the codec.
      tensor: flat; given away.
      seeds: of its segments, where it is cut.
    """

    codec: Codec
    method: str
    state: CodecState
    tensor: Tensor
    seeds: Seeds


@dataclass(frozen=True, slots=True)
class Exchange:
    """What all paths of one exchange have alike.

    Args:
      channel: the exchange's.
      collective: a name in :data:`farflung.comm.COLLECTIVES`.
      side: float64 numbers, summed in rank order beside the tensor; the first is the weight.
      step: for the codecs.
      dtype: of the gradient; ``None``: that of the tensors that are summed.
    """

    channel: Channel
    collective: str
    side: Tensor
    step: int
    dtype: torch.dtype | None = None

    def encode(self, own: Parcel) -> tuple[Payload, CodecState]:
        """The rank's own tensor, whole."""
        cost = CodingCost("encode", own.method, own.tensor.numel())
        encode = partial(own.codec.encode, own.state, own.tensor, step=self.step, count=1)
        return self.channel.compute(cost, encode)

    def sum(self, tensor: Tensor, coding: Coding | None = None) -> Awaitable[tuple[Tensor, Tensor]]:
        """Returns the sums of a flat tensor, given away, and of the side."""
        all_reduce = self.channel.collective(self.collective)
        return all_reduce(self.channel, tensor, self.side, coding=coding)

    async def sum_dense(self, tensor: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the sums of a flat tensor, given away, which travels in the type of the gradient, and of the side.

        In float16 it is divided by the number of replicas before the sum and multiplied after it, so that sums of
        numbers of which the mean is in range do not overflow. Where all weights are 1, the mean has the bits of
        DistributedDataParallel's, which divides so too. A residual in it is cut to what a gradient could be.
        """
        if self.dtype is None or self.dtype == tensor.dtype:
            return await self.sum(tensor)
        size, cost = self.channel.size, CodingCost("copy", "", tensor.numel())
        limit = max(float(self.side[0]), 1.0) * torch.finfo(self.dtype).max / size
        narrow = self.channel.compute(cost, lambda: limited(tensor.mul(1 / size), limit).to(self.dtype))
        total, side = await self.sum(narrow)
        return self.channel.compute(cost, lambda: tensor.copy_(total).mul_(size)), side


class AggregationPath(Protocol):
    """One tensor on its way."""

    state: CodecState
    """What encoding has left behind."""
    posted: bool
    """Whether it is on its way already, so that others should not wait for its end to begin."""

    async def finish(self) -> tuple[Tensor, Tensor]:
        """The sums of tensor and side, bit-identical on all ranks."""
        ...

    def learn(self, state: CodecState, average: Tensor) -> CodecState:
        """What ``state`` becomes when the result is merged; ``average`` is the sum over the number of ranks."""
        ...


def both(payload: Payload, device: torch.device) -> tuple[Payload, Tensor]:
    """An encoded tensor, on ``device``, and the side that rode with it."""
    encoded, side = payload.parts
    assert isinstance(encoded, Payload)
    assert isinstance(side, Tensor)
    return on_device(encoded, device), side


def unwrapped(codec: Codec, state: CodecState) -> tuple[Codec, CodecState]:
    """What encodes segments; error feedback is left to the path."""
    if isinstance(codec, ErrorFeedback):
        return codec.codec, inner_state(state)
    return codec, state


def check_cut(codec: Codec, state: CodecState) -> None:
    """Whether a codec can encode segments of a tensor, in two phases or on every hop.

    Raises:
      Unsupported: it keeps something of a whole tensor that a segment's codec would not have.
    """
    inner, inside = unwrapped(codec, state)
    if not only_seeds(inside):
        raise Unsupported(
            f"codec {inner!r} keeps more than seeds between steps and cannot encode segments: use phases='gather'"
        )


class Summed:
    """Sums the tensor as it is by one all-reduce."""

    posted = False

    def __init__(self, exchange: Exchange, state: CodecState, tensor: Tensor) -> None:
        self.state = state
        self._exchange, self._tensor = exchange, tensor

    async def finish(self) -> tuple[Tensor, Tensor]:
        return await self._exchange.sum_dense(self._tensor)

    def learn(self, state: CodecState, average: Tensor) -> CodecState:
        del average
        return state


class Linear:
    """Encoded once; the payload's tensors are summed by the collective, and the sums decoded."""

    posted = False

    def __init__(self, exchange: Exchange, own: Parcel) -> None:
        self._exchange, self._codec, self._method = exchange, own.codec, own.method
        self._spec = TensorSpec.of(own.tensor)
        self._payload, self.state = exchange.encode(own)

    async def finish(self) -> tuple[Tensor, Tensor]:
        """One all-reduce for each dtype in the payload; there is rarely more than one."""
        by_dtype: dict[torch.dtype, list[Tensor]] = {}
        for tensor in self._payload.tensors():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
        totals: dict[torch.dtype, Iterator[Tensor]] = {}
        side = self._exchange.side
        for dtype, tensors in by_dtype.items():
            flat = [tensor.reshape(-1) for tensor in tensors]
            total, side = await self._exchange.sum(flat[0] if len(flat) == 1 else torch.cat(flat))
            totals[dtype] = iter(total.split([len(part) for part in flat]))
        payload = rebuilt(self._payload, lambda tensor: next(totals[tensor.dtype]).view(tensor.shape))
        channel, step = self._exchange.channel, self._exchange.step
        cost = CodingCost("decode", self._method, self._spec.numel)
        decode = partial(self._codec.decode, self.state, payload, self._spec, step=step, count=channel.size)
        return channel.compute(cost, decode), side

    def learn(self, state: CodecState, average: Tensor) -> CodecState:
        return self._codec.observe(state, average, step=self._exchange.step)


class Gathered:
    """Encoded once; every rank sends its payload to all, and decodes and adds them in rank order.

    One way and one delay, but traffic that grows with the number of ranks.
    """

    posted = True

    def __init__(self, exchange: Exchange, own: Parcel) -> None:
        self._exchange, self._codec, self._method, self._tensor = exchange, own.codec, own.method, own.tensor
        payload, self.state = exchange.encode(own)
        # No rank says when all have read it, and the sum is written where the tensor was.
        self._own = unshared(payload, own.tensor)
        self._hop = exchange.channel.hops(1)
        for peer in others(exchange.channel):
            exchange.channel.send(Payload((self._own, exchange.side)), peer, self._hop)

    async def finish(self) -> tuple[Tensor, Tensor]:
        """The sums, in rank order whatever came first."""
        channel, codec, state = self._exchange.channel, self._codec, self.state
        numel = self._tensor.numel()
        add = (
            partial(codec.add_components, state)
            if isinstance(codec, Transformed)
            else partial(accumulate, codec, state, step=self._exchange.step, count=1)
        )
        cost = CodingCost("accumulate", self._method, numel)
        expect = (*map(TensorSpec.of, self._own.tensors()), TensorSpec.of(self._exchange.side))
        self._tensor.zero_()
        side = torch.zeros_like(self._exchange.side)
        for rank in range(channel.size):
            payload, riding = self._own, self._exchange.side
            if rank != channel.rank:
                payload, riding = both(await channel.recv(rank, self._hop, expect), self._tensor.device)
            channel.compute(cost, partial(add, payload, self._tensor))
            side += riding
        if isinstance(codec, Transformed):
            cost = CodingCost("decode", self._method, numel)
            self._tensor = channel.compute(cost, partial(codec.restored, state, self._tensor))
        return self._tensor, side

    def learn(self, state: CodecState, average: Tensor) -> CodecState:
        return self._codec.observe(state, average, step=self._exchange.step)


class Hops:
    """Partial sums encoded anew on every hop of the collective.

    With error feedback the residual is taken out of the state when the exchange begins, and what this rank's own
    encodings left out is added when the result is merged. So nothing is lost, and nothing is sent twice.

    References: Li et al. 2018 (Pipe-SGD), compression inside AllReduce; error feedback on hops is our choice.
    """

    posted = False

    def __init__(self, exchange: Exchange, own: Parcel) -> None:
        tensor, self.state = own.tensor, own.state
        self._exchange, self._tensor = exchange, tensor
        self._left: Tensor | None = None
        if isinstance(own.codec, ErrorFeedback):
            residual = own.state.local["residual"]
            cost = CodingCost("add", "", tensor.numel())
            self._tensor = exchange.channel.compute(cost, partial(tensor.add_, residual.to(tensor.device)))
            self._left = torch.zeros_like(tensor)
            self.state = with_residual(own.state, torch.zeros_like(residual))
        inner, _ = unwrapped(own.codec, own.state)
        self._coding = Coding(inner, own.seeds, exchange.step, self._left, own.method)

    async def finish(self) -> tuple[Tensor, Tensor]:
        return await self._exchange.sum(self._tensor, self._coding)

    def learn(self, state: CodecState, average: Tensor) -> CodecState:
        """With error feedback, what was left out."""
        del average
        if self._left is None:
            return state
        return with_residual(state, state.local["residual"].to(self._left.device) + self._left)


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
            unshared(self._coding.encode(segment.of(wanted), segment, 1), wanted)
            for segment in self._segments
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
