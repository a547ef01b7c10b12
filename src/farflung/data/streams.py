"""The stream that is all there from the start."""

from __future__ import annotations

import torch

from farflung.types import Arrivals, SampleIds, State

__all__ = ["InMemory"]


class InMemory:
    """All of the data set at any time; nothing arrives, nothing is kept back."""

    everything = True

    def poll(self, now: float, wanted: int) -> Arrivals:
        """Nothing new, and no wait."""
        del now, wanted
        return Arrivals(torch.empty(0, dtype=torch.int64), None)

    def commit(self, ids: SampleIds, *, step: int) -> None:
        """The sampler's cursor is position enough."""

    def state_dict(self) -> State:
        """No position."""
        return {}

    def seek(self, state: State) -> None:
        """No position."""
        del state
