"""Encoded anew on every hop of a collective."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from farflung.codecs import ErrorFeedback
from farflung.codecs.error_feedback import with_residual
from farflung.comm import Coding
from farflung.reducers.journeys.journey import Exchange, unwrapped
from farflung.types import Codec, CodecState, CodingCost, Seeds

__all__ = ["Hops"]


class Hops:
    """Partial sums encoded anew on every hop of the collective.

    With error feedback the residual is taken out of the state when the exchange begins, and what this rank's own
    encodings left out is added when the result is merged. So nothing is lost, and nothing is sent twice.

    References: Li et al. 2018 (Pipe-SGD), compression inside AllReduce; error feedback on hops is our choice.
    """

    posted = False

    def __init__(
        self,
        exchange: Exchange,
        codec: Codec,
        method: str,
        state: CodecState,
        tensor: Tensor,
        seeds: Seeds,
    ) -> None:
        self._exchange, self._tensor, self.state = exchange, tensor, state
        self._left: Tensor | None = None
        inner, _ = unwrapped(codec, state)
        if isinstance(codec, ErrorFeedback):
            residual = state.local["residual"]
            cost = CodingCost("add", "", tensor.numel())
            self._tensor = exchange.channel.compute(cost, partial(tensor.add_, residual.to(tensor.device)))
            self._left = torch.zeros_like(tensor)
            self.state = with_residual(state, torch.zeros_like(residual))
        self._coding = Coding(inner, seeds, exchange.step, self._left, method)

    async def finish(self) -> tuple[Tensor, Tensor]:
        """One all-reduce."""
        return await self._exchange.sum(self._tensor, self._coding)

    def learn(self, state: CodecState, average: Tensor) -> CodecState:
        """With error feedback, what was left out."""
        del average
        if self._left is None:
            return state
        return with_residual(state, state.local["residual"].to(self._left.device) + self._left)
