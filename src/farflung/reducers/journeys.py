"""How a tensor encoded by one codec is summed over the replicas.

A :class:`Journey` begins when it is made: what encoding changes in a state has changed by then, and what can be sent
at once is on its way. So several of them, for the parts of one bucket, overlap.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from farflung.codecs import ErrorFeedback
from farflung.codecs.error_feedback import inner_state, with_residual
from farflung.codecs.trees import apart, only_seeds, rebuilt
from farflung.comm import COLLECTIVES, Coding
from farflung.comm.collectives.segments import others
from farflung.comm.staging import on_device
from farflung.errors import Unsupported
from farflung.types import Channel, Codec, CodecState, Payload, Seeds, TensorSpec

__all__ = ["Exchange", "Gathered", "Hops", "Journey", "Linear", "Summed", "both", "check_cut", "unwrapped"]


@dataclass(frozen=True, slots=True)
class Exchange:
    """What all journeys of one exchange have alike.

    Args:
      channel: the exchange's.
      collective: a name in :data:`farflung.comm.COLLECTIVES`.
      side: float64 numbers, summed in rank order beside the tensor.
      step: for the codecs.
    """

    channel: Channel
    collective: str
    side: Tensor
    step: int

    async def sum(self, tensor: Tensor, coding: Coding | None = None) -> tuple[Tensor, Tensor]:
        """The sums of a flat tensor, given away, and of the side."""
        return await COLLECTIVES[self.collective](self.channel, tensor, self.side, coding=coding)


class Journey(Protocol):
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


class Summed:
    """Dense."""

    posted = False

    def __init__(self, exchange: Exchange, state: CodecState, tensor: Tensor) -> None:
        self.state = state
        self._exchange, self._tensor = exchange, tensor

    async def finish(self) -> tuple[Tensor, Tensor]:
        """One all-reduce."""
        return await self._exchange.sum(self._tensor)

    def learn(self, state: CodecState, average: Tensor) -> CodecState:
        """Nothing."""
        del average
        return state


class Hops:
    """Partial sums encoded anew on every hop of the collective.

    With error feedback the residual is taken out of the state when the exchange begins, and what this rank's own
    encodings left out is added when the result is merged. So nothing is lost, and nothing is sent twice.

    References: Li et al. 2018 (Pipe-SGD), compression inside AllReduce; error feedback on hops is our choice.
    """

    posted = False

    def __init__(
        self, exchange: Exchange, codec: Codec, state: CodecState, tensor: Tensor, seeds: Seeds
    ) -> None:
        self._exchange, self._tensor, self.state = exchange, tensor, state
        self._left: Tensor | None = None
        inner, _ = unwrapped(codec, state)
        if isinstance(codec, ErrorFeedback):
            residual = state.local["residual"]
            self._tensor = tensor.add_(residual.to(tensor.device))
            self._left = torch.zeros_like(tensor)
            self.state = with_residual(state, torch.zeros_like(residual))
        self._coding = Coding(inner, seeds, exchange.step, self._left)

    async def finish(self) -> tuple[Tensor, Tensor]:
        """One all-reduce."""
        return await self._exchange.sum(self._tensor, self._coding)

    def learn(self, state: CodecState, average: Tensor) -> CodecState:
        """With error feedback, what was left out."""
        del average
        if self._left is None:
            return state
        return with_residual(state, state.local["residual"].to(self._left.device) + self._left)


class Linear:
    """Encoded once; the payload's tensors are summed by the collective, and the sums decoded."""

    posted = False

    def __init__(self, exchange: Exchange, codec: Codec, state: CodecState, tensor: Tensor) -> None:
        self._exchange, self._codec, self._spec = exchange, codec, TensorSpec.of(tensor)
        self._payload, self.state = codec.encode(state, tensor, step=exchange.step, count=1)

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
        step, count = self._exchange.step, self._exchange.channel.size
        return self._codec.decode(self.state, payload, self._spec, step=step, count=count), side

    def learn(self, state: CodecState, average: Tensor) -> CodecState:
        """What the codec learns."""
        return self._codec.observe(state, average, step=self._exchange.step)


class Gathered:
    """Encoded once; every rank sends its payload to all, and decodes and adds them in rank order.

    One way and one delay, but traffic that grows with the number of ranks.
    """

    posted = True

    def __init__(self, exchange: Exchange, codec: Codec, state: CodecState, tensor: Tensor) -> None:
        self._exchange, self._codec, self._tensor = exchange, codec, tensor
        payload, self.state = codec.encode(state, tensor, step=exchange.step, count=1)
        # Nobody says when all have read it, and the sum is written where the tensor was.
        self._own = apart(payload, tensor)
        self._hop = exchange.channel.hops(1)
        for peer in others(exchange.channel):
            exchange.channel.send(Payload((self._own, exchange.side)), peer, self._hop)

    async def finish(self) -> tuple[Tensor, Tensor]:
        """The sums, in rank order whoever was first."""
        channel, spec = self._exchange.channel, TensorSpec.of(self._tensor)
        expect = (*map(TensorSpec.of, self._own.tensors()), TensorSpec.of(self._exchange.side))
        side: Tensor | None = None
        for rank in range(channel.size):
            payload, riding = self._own, self._exchange.side
            if rank != channel.rank:
                payload, riding = both(await channel.recv(rank, self._hop, expect), self._tensor.device)
            decoded = self._codec.decode(self.state, payload, spec, step=self._exchange.step, count=1)
            if side is None:
                self._tensor.copy_(decoded)
                side = riding.clone()
            else:
                self._tensor.add_(decoded)
                side.add_(riding)
        assert side is not None
        return self._tensor, side

    def learn(self, state: CodecState, average: Tensor) -> CodecState:
        """What the codec learns."""
        return self._codec.observe(state, average, step=self._exchange.step)


def both(payload: Payload, device: torch.device) -> tuple[Payload, Tensor]:
    """An encoded tensor, on ``device``, and the side that rode with it."""
    encoded, side = payload.parts
    assert isinstance(encoded, Payload)
    assert isinstance(side, Tensor)
    return on_device(encoded, device), side


def unwrapped(codec: Codec, state: CodecState) -> tuple[Codec, CodecState]:
    """What encodes segments; error feedback is left to the journey."""
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
