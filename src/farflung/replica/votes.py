"""What replicas say beside their gradients, so that all of them decide alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["Rider", "Tally", "Vote"]

OF_VOTES = ("loss", "nonfinite", "ranks", "squares of ranks", "answers")
"""What every rider begins with."""
_DIGIT = 1 << 16
"""Yes or no is summed in a digit of its own of ``answers``, in this base: more replicas than there ever are."""


@dataclass(frozen=True, slots=True)
class Vote:
    """What a replica says about one of its steps.

    Args:
      loss: this replica's weighted mean loss.
      weight: its weight in the mean.
      numbers: what its parts add, by name; summed over replicas and steps.
      out: whether it has run out of data, and only answers the others.
    """

    loss: float
    weight: float
    numbers: Mapping[str, float] = field(default_factory=dict)
    out: bool = False

    @property
    def finite(self) -> bool:
        """Whether the loss is a number."""
        return math.isfinite(self.loss)


@dataclass(frozen=True, slots=True)
class Tally:
    """The summed metadata of all replicas.

    Args:
      loss: the sum of losses times weights.
      nonfinite: the number of losses that are not finite.
      ranks: the ranks of one or two such losses; empty for more.
      asks: whether any replica uses other parameters than before; see :class:`farflung.replica.unused.Unused`.
      out: the number of replicas that have run out of data.
      sums: the sums of the parts' numbers, by name.
    """

    loss: float
    nonfinite: int
    ranks: list[int]
    asks: bool
    out: int
    sums: Mapping[str, float]


class Rider:
    """The float64 numbers that ride beside every exchange and are summed over the replicas, by name.

    Args:
      names: what parts add to those of the votes.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = tuple(names)

    @property
    def numbers(self) -> int:
        return len(OF_VOTES) + len(self._names)

    def cast(
        self, steps: Sequence[Vote], rank: int, numbers: Mapping[str, float], *, asks: bool = False
    ) -> tuple[float, Tensor]:
        """Computes a replica's weight in an exchange, and its metadata as a float64 vector.

        The weight is the mean over the steps; a step whose loss is not finite has weight 0.

        Args:
          steps: the metadata of each step since the part's last exchange.
          rank: this replica.
          numbers: what its parts add; 0 where a name is missing.
          asks: whether it uses other parameters than before.

        Raises:
          ValueError: a number without a place.
        """
        weight, loss, bad, out = 0.0, 0.0, 0, True
        for vote in steps:
            out &= vote.out
            if vote.finite:
                weight += vote.weight
                loss += vote.loss * vote.weight
            else:
                bad += 1
        count = len(steps)
        answers = asks + _DIGIT * out
        said = [loss / count, bad, bad * rank, bad * rank**2, answers, *[0.0] * len(self._names)]
        for name, value in numbers.items():
            said[len(OF_VOTES) + self._names.index(name)] += value
        return weight / count, torch.tensor(said, dtype=torch.float64)

    def read(self, summed: Tensor) -> Tally:
        """What the sum of all riders says."""
        loss, bad, ranks, squares, answers, *said = summed.tolist()
        out, asks = divmod(int(answers), _DIGIT)
        sums = dict(zip(self._names, said, strict=True))
        return Tally(loss, int(bad), _ranks(int(bad), ranks, squares), bool(asks), out, sums)


def _ranks(count: int, total: float, squares: float) -> list[int]:
    """One or two ranks from their sum and the sum of their squares."""
    if count == 1:
        return [int(total)]
    if count == 2:
        spread = (2 * squares - total**2) ** 0.5
        return sorted({round((total - spread) / 2), round((total + spread) / 2)})
    return []
