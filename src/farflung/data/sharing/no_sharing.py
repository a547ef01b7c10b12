"""Samples stay where they are."""

from __future__ import annotations

from farflung.types import Sharing

__all__ = ["NoSharing"]


class NoSharing(Sharing):
    """Every replica keeps its samples to itself.

    Args:
      seed: not needed.
    """

    def __init__(self, seed: int = 0) -> None:
        del seed
