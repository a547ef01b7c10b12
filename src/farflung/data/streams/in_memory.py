"""The stream that is all there from the start."""

from __future__ import annotations

import torch

from farflung.types import Arrivals, Feed, SampleIds, Samples, State

__all__ = ["InMemory"]

_NOTHING = Arrivals(torch.empty(0, dtype=torch.int64))


class InMemory:
    """All of the data set at any time; nothing arrives, nothing is kept back."""

    everything = True

    def open(self, feed: Feed) -> Samples:
        """The samples that the replica draws from."""
        return feed.data

    def poll(self, now: float, step: int) -> Arrivals:
        """Nothing new, and no wait."""
        del now, step
        return _NOTHING

    def commit(self, ids: SampleIds, *, step: int) -> None:
        """The sampler's cursor is position enough."""

    def state_dict(self) -> State:
        """No position."""
        return {}

    def seek(self, state: State) -> None:
        """No position."""
        del state

    def close(self) -> None:
        """Nothing to end."""
