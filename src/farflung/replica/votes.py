"""What replicas say beside their gradients, so that all of them decide alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.types import Reduced

__all__ = ["Vote", "ballot", "mean_loss", "odd_ranks"]


@dataclass(frozen=True, slots=True)
class Vote:
    """What a replica says about one of its steps.

    Args:
      loss: this replica's weighted mean loss.
      weight: its weight in the mean.
      stop: whether it was asked to stop.
    """

    loss: float
    weight: float
    stop: bool = False

    @property
    def finite(self) -> bool:
        """Whether the loss is a number."""
        return math.isfinite(self.loss)


def ballot(votes: Sequence[Vote], rank: int) -> tuple[float, Tensor]:
    """A replica's weight in an exchange of the steps voted on, and the rider that is summed over all.

    The weight is the mean over the steps, where one whose loss is not finite counts nothing. The rider is ``[loss
    numerator, non-finite losses, sum and sum of squares of their ranks, stops]``.
    """
    steps = len(votes)
    bad = sum(not vote.finite for vote in votes)
    weight = sum(vote.weight for vote in votes if vote.finite) / steps
    loss = sum(vote.loss * vote.weight for vote in votes if vote.finite) / steps
    stop = any(vote.stop for vote in votes)
    return weight, torch.tensor([loss, bad, bad * rank, bad * rank**2, stop], dtype=torch.float64)


def mean_loss(reduced: Reduced) -> float:
    """Over all replicas, by weight; 0 where nobody has any."""
    return float(reduced.rider[0]) / reduced.weight if reduced.weight else 0.0


def odd_ranks(rider: Tensor) -> list[int]:
    """Whose losses were not finite, from how many, the sum and the sum of squares of their ranks.

    Empty for more than two losses.
    """
    _, bad, ranks, squares, _ = rider.tolist()
    if bad == 1:
        return [int(ranks)]
    if bad == 2:
        spread = (2 * squares - ranks**2) ** 0.5
        return sorted({round((ranks - spread) / 2), round((ranks + spread) / 2)})
    return []
