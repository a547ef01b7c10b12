"""Orders of transfers by the operations that wait for them: TIC and TAC of TicTac."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

__all__ = ["rank_by_tac", "rank_by_tic"]


def rank_by_tic(dependencies: Sequence[frozenset[int]], transfers: Sequence[int]) -> dict[int, int]:
    r"""Ranks transfers by the least number of transfers that an operation needs together with each.

    .. math:: M^+_r = \min_{c:\, r \in D_c,\, |D_c| > 1} |D_c|

    Equal ones share a rank. Those that no operation needs together with others come last.

    Args:
      dependencies: :math:`D_c`, the transfers that each operation needs, directly or through its inputs.
      transfers: Transfers to rank.

    References: Hashemi et al. 2019 (TicTac), TIC; shared ranks as in the authors' code.
    """
    least = _find_least_costs(dependencies, dict.fromkeys(transfers, 1))
    return {transfer: sum(other < least[transfer] for other in least.values()) for transfer in transfers}


def rank_by_tac(
    dependencies: Sequence[frozenset[int]], costs: Sequence[float], transfer_costs: Mapping[int, float]
) -> dict[int, int]:
    r"""Ranks transfers one after the other, by the computation that each unlocks and the time that it takes.

    With O the transfers without a rank, and A before B if the first inequality holds, or on a tie the second:

    .. math::
        P_r = \sum_{c:\, D_c \cap O = \{r\}} t_c, \qquad \min(P_B, M_A) < \min(P_A, M_B), \qquad M^+_A < M^+_B

    Args:
      dependencies: :math:`D_c`, the transfers that each operation needs, directly or through its inputs.
      costs: :math:`t_c`, cost of each operation.
      transfer_costs: :math:`M_r`, cost of each transfer to rank, in the same unit.

    References: Hashemi et al. 2019 (TicTac), TAC.
    """
    remaining, ranks = dict(transfer_costs), dict[int, int]()
    operations: dict[frozenset[int], float] = defaultdict(float)
    for needs, cost in zip(dependencies, costs, strict=True):
        operations[needs] += cost
    while remaining:
        least = _find_least_costs(operations, remaining)
        unlocked = {transfer: operations.get(frozenset({transfer}), 0.0) for transfer in remaining}
        first, *others = remaining
        for other in others:
            loss = min(unlocked[first], remaining[other])
            gain = min(unlocked[other], remaining[first])
            if loss < gain or (loss == gain and least[other] < least[first]):
                first = other
        ranks[first] = len(ranks)
        del remaining[first]
        merged: dict[frozenset[int], float] = defaultdict(float)
        for needs, cost in operations.items():
            merged[needs - {first}] += cost
        operations = merged
    return ranks


def _find_least_costs(dependencies: Iterable[frozenset[int]], costs: Mapping[int, float]) -> dict[int, float]:
    """Returns :math:`M^+` of each transfer: the least cost of all that an operation needs together with it."""
    least = dict.fromkeys(costs, math.inf)
    for needs in dependencies:
        if len(needs) > 1:
            total = math.fsum(costs[transfer] for transfer in needs)
            for transfer in needs:
                least[transfer] = min(least[transfer], total)
    return least
