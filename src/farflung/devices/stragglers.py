"""Devices that are slow for a while."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from farflung.noise import uniform
from farflung.options import check_factor, require

__all__ = ["Moment", "Occasional", "Scheduled", "Straggler", "Varying"]


@dataclass(frozen=True, slots=True)
class Moment:
    """When and for which rank a slow-down is asked.

    Args:
      seed: of the world.
      rank: the device's.
      step: how many forward passes it has begun.
      now_s: the time at which the computation begins.
    """

    seed: int
    rank: int
    step: int
    now_s: float


class Straggler(Protocol):
    """How much longer computations take than they would; equal for equal moments."""

    def slowdown(self, moment: Moment) -> float:
        """A factor."""
        ...


@dataclass(frozen=True, slots=True)
class Occasional:
    """Some steps take longer, each with the same probability.

    Args:
      probability: of a slow step.
      factor: how much longer it takes.

    Raises:
      ConfigError: a value out of its range; begins with its name.
    """

    probability: float
    factor: float

    def __post_init__(self) -> None:
        require(0 <= self.probability <= 1, "probability", self.probability, "in [0, 1]")
        check_factor("factor", self.factor)

    def slowdown(self, moment: Moment) -> float:
        drawn = uniform(moment.seed, 1, moment.rank, moment.step)
        return self.factor if drawn < self.probability else 1.0


@dataclass(frozen=True, slots=True)
class Varying:
    r"""Every step takes its own time, :math:`1 + s X` with :math:`X` exponential of mean 1.

    Args:
      spread: :math:`s`; the mean is ``1 + spread``.

    Raises:
      ConfigError: negative.

    References: Lee et al. 2018, the shifted exponential model of stragglers.
    """

    spread: float

    def __post_init__(self) -> None:
        require(0 <= self.spread < math.inf, "spread", self.spread, "0 or more")

    def slowdown(self, moment: Moment) -> float:
        return 1.0 - self.spread * math.log1p(-uniform(moment.seed, 2, moment.rank, moment.step))


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Slow from one time to another; a computation counts by when it begins.

    Args:
      begin_s: in seconds on the run's clock.
      end_s: the same.
      factor: how much longer computations take.
      ranks: the ranks; where it is empty, all that have the profile.

    Raises:
      ConfigError: a value out of its range; begins with its name.
    """

    begin_s: float
    end_s: float
    factor: float
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        expected = f"0 or more, and before end_s = {self.end_s}"
        require(0 <= self.begin_s < self.end_s, "begin_s", self.begin_s, expected)
        check_factor("factor", self.factor)

    def slowdown(self, moment: Moment) -> float:
        is_affected = not self.ranks or moment.rank in self.ranks
        return self.factor if is_affected and self.begin_s <= moment.now_s < self.end_s else 1.0
