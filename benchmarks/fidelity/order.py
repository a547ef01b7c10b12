"""Whether the simulator puts recipes in the order that they have in the lab."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

__all__ = ["SAME", "Timed", "agreement", "tau", "without_one"]

SAME = 0.02
"""Step times of two runs that differ by less are equal: as much as one recipe's differ from run to run."""


@dataclass(frozen=True, slots=True)
class Timed:
    """What a step of one recipe takes.

    Args:
      lab_s: in the lab, in seconds.
      standard_error_s: of that mean over the run's steps.
      simulated_s: in virtual time.
    """

    lab_s: float
    standard_error_s: float
    simulated_s: float


def agreement(recipes: Sequence[Timed]) -> tuple[int, int]:
    """Pairs in the same order less pairs in the other one, and all pairs.

    Pairs that the lab does not tell apart are left out: those within twice the standard error of their difference, or
    within :data:`COMPARED_SETTINGS`. One that only the simulator takes for equal counts as a pair, for neither order.

    Args:
      recipes: of one network.
    """
    score = pairs = 0
    for one, other in combinations(recipes, 2):
        apart = one.lab_s - other.lab_s
        spread = 2 * math.hypot(one.standard_error_s, other.standard_error_s)
        if abs(apart) <= max(spread, SAME * min(one.lab_s, other.lab_s)):
            continue
        pairs += 1
        simulated = one.simulated_s - other.simulated_s
        score += 0 if simulated == 0 else 1 if (simulated > 0) == (apart > 0) else -1
    return score, pairs


def tau(found: Sequence[tuple[int, int]]) -> float | None:
    """Kendall's tau over the pairs of all networks together; none where no two recipes differ.

    A network counts by its pairs: our choice, since one with a single pair would otherwise count as much as one with
    six.

    Args:
      found: of each network, as :func:`agreement` gives it.

    References: Kendall 1938; without ties of the first ranking, as Goodman & Kruskal 1954.
    """
    pairs = sum(count for _, count in found)
    return sum(score for score, _ in found) / pairs if pairs else None


def without_one(found: Sequence[tuple[int, int]]) -> tuple[float, float]:
    """The lowest and the highest tau where one network is left out (jackknife)."""
    taus = [tau([*found[:place], *found[place + 1 :]]) for place in range(len(found))]
    there = [one for one in taus if one is not None] or [one for one in (tau(found),) if one is not None]
    return min(there), max(there)
