"""Stragglers: devices that are temporarily slow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from farflung.noise import draw_uniform
from farflung.options import check_factor, require

__all__ = ["Moment", "OccasionalStraggler", "ScheduledStraggler", "Straggler", "VaryingStraggler"]


@dataclass(frozen=True, slots=True)
class Moment:
    """Rank, step and time of a computation.

    Args:
      seed: Seed of the world.
      rank: Rank of the device.
      step: Number of forward passes that it has begun.
      time_s: Time at which the computation begins.
    """

    seed: int
    rank: int
    step: int
    time_s: float


class Straggler(Protocol):
    """Cause of temporary slow-downs; equal moments give equal factors."""

    def compute_slowdown(self, moment: Moment) -> float:
        """Computes the factor of the time of a computation."""
        ...


@dataclass(frozen=True, slots=True)
class OccasionalStraggler:
    """Straggler whose steps take longer with a fixed probability.

    Args:
      probability: Probability of a slow step.
      factor: Factor of its time.

    Raises:
      ConfigError: A value is out of range; begins with its name.
    """

    probability: float
    factor: float

    def __post_init__(self) -> None:
        require(0 <= self.probability <= 1, "probability", self.probability, "in [0, 1]")
        check_factor("factor", self.factor)

    def compute_slowdown(self, moment: Moment) -> float:
        drawn = draw_uniform(moment.seed, 1, moment.rank, moment.step)
        return self.factor if drawn < self.probability else 1.0


@dataclass(frozen=True, slots=True)
class VaryingStraggler:
    r"""Straggler whose steps take a factor of :math:`1 + s X` each, with :math:`X` exponential of mean 1.

    Args:
      spread: :math:`s`; the mean is ``1 + spread``.

    Raises:
      ConfigError: The spread is negative.

    References: Lee et al. 2018, the shifted exponential model of stragglers.
    """

    spread: float

    def __post_init__(self) -> None:
        require(0 <= self.spread < math.inf, "spread", self.spread, "0 or more")

    def compute_slowdown(self, moment: Moment) -> float:
        return 1.0 - self.spread * math.log1p(-draw_uniform(moment.seed, 2, moment.rank, moment.step))


@dataclass(frozen=True, slots=True)
class ScheduledStraggler:
    """Straggler that is slow in an interval of time; the start of a computation decides.

    Args:
      begin_s: Start of the interval in seconds on the run's clock.
      end_s: End of the interval in seconds on the run's clock.
      factor: Factor of the time of computations.
      ranks: Affected ranks; empty for all that have the profile.

    Raises:
      ConfigError: A value is out of range; begins with its name.
    """

    begin_s: float
    end_s: float
    factor: float
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        expected = f"0 or more, and before end_s = {self.end_s}"
        require(0 <= self.begin_s < self.end_s, "begin_s", self.begin_s, expected)
        check_factor("factor", self.factor)

    def compute_slowdown(self, moment: Moment) -> float:
        is_affected = not self.ranks or moment.rank in self.ranks
        return self.factor if is_affected and self.begin_s <= moment.time_s < self.end_s else 1.0
