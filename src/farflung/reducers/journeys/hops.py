"""Encoded anew on every hop of a collective."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from farflung.codecs import ErrorFeedback
from farflung.codecs.error_feedback import with_residual
from farflung.comm import Coding
from farflung.reducers.journeys.journey import Exchange, Parcel, unwrapped
from farflung.types import CodecState, CodingCost

__all__ = ["Hops"]


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
        """One all-reduce."""
        return await self._exchange.sum(self._tensor, self._coding)

    def learn(self, state: CodecState, average: Tensor) -> CodecState:
        """With error feedback, what was left out."""
        del average
        if self._left is None:
            return state
        return with_residual(state, state.local["residual"].to(self._left.device) + self._left)
