"""Dense."""

from __future__ import annotations

from torch import Tensor

from farflung.reducers.journeys.journey import Exchange
from farflung.types import CodecState

__all__ = ["Summed"]


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
