"""Encoded once, and summed encoded."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from farflung.reducers.journeys.journey import Exchange, Parcel
from farflung.trees import rebuilt
from farflung.types import CodecState, CodingCost, TensorSpec

__all__ = ["Linear"]


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
        """What the codec learns."""
        return self._codec.observe(state, average, step=self._exchange.step)
