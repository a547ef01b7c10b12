"""A sampler that knows something of samples, for tests of samples that change owner."""

from __future__ import annotations

import torch

from farflung.sampling import UniformSampler
from farflung.types import Draw, DrawContext, SampleIds, State


class Carrying(UniformSampler):
    """Draws uniformly; knows of each sample how often it was drawn, and gives away what was drawn most.

    Args:
      seed: of the order.
    """

    can_transfer_scores = True

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.known = torch.empty(0)

    def draw(self, context: DrawContext) -> Draw:
        assert isinstance(context.pool, int)
        if not len(self.known):
            self.known = torch.zeros(context.pool)
        draw = super().draw(context)
        self.known.index_add_(0, draw.ids, torch.ones(len(draw.ids)))
        return draw

    def choose_outgoing(self, count: int, step: int) -> SampleIds:
        del step
        return self.known.argsort(descending=True, stable=True)[:count]

    def get_scores(self, ids: SampleIds) -> torch.Tensor:
        return self.known[ids]

    def set_scores(self, ids: SampleIds, scores: torch.Tensor) -> None:
        self.known[ids] = scores

    def state_dict(self) -> State:
        return {**super().state_dict(), "known": self.known.clone()}

    def load_state_dict(self, state: State) -> None:
        super().load_state_dict(state)
        self.known = state["known"]
