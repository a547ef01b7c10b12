"""Sharing: samples that move between replicas."""

from __future__ import annotations

from collections.abc import Callable

from farflung.types import Batch, Channel, Samples, Sharing

__all__ = ["SHARINGS", "NoSharing"]


class NoSharing:
    """Every replica keeps its samples to itself."""

    data_leaves_device = False

    def due(self, step: int) -> bool:
        """Never."""
        del step
        return False

    async def exchange(self, channel: Channel, samples: Samples, rows: Batch, *, step: int) -> Batch:
        """Sends nothing."""
        del channel, samples, step
        return rows


SHARINGS: dict[str, Callable[..., Sharing]] = {
    "none": NoSharing,
}
"""All of them by name; each is made anew for every replica."""
