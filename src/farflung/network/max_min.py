"""Max-min fair rates: no flow's rate can grow except at the cost of a flow whose rate is no larger."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeAlias, TypeVar

__all__ = ["compute_max_min_rates"]

R = TypeVar("R", bound=Hashable)
FlowUses: TypeAlias = Sequence[tuple[R, int]]


def compute_max_min_rates(flows: Iterable[FlowUses[R]], capacity_bps: Callable[[R], float]) -> list[float]:
    r"""Computes the rate of each flow, by progressive filling.

    All rates grow together until a resource is full; its flows are then fixed, and the others share the rest. With
    :math:`m_{fr}` the use flow :math:`f` makes of resource :math:`r`, :math:`\sum_f m_{fr} x_f \le c_r`.

    Flows that are fixed at one level are subtracted from a resource as level times count, in ascending levels.
    So the rates of equal flows are equal to the last bit, in any order, and equal to that of one flow that
    stands for the class. The number of levels is at most the number of resources.

    Args:
      flows: For each flow, the resources that it uses, and how many times.
      capacity_bps: Returns the capacity of a resource.

    Returns:
      Bits per second, in the order of ``flows``.

    References: Bertsekas & Gallager 1992, section 6.5.2.
    """
    members = [*flows]
    rates = [0.0] * len(members)
    remaining_bps: dict[R, float] = {}
    users: dict[R, list[int]] = {}
    count: dict[R, int] = {}
    for index, uses in enumerate(members):
        for resource, times in uses:
            if resource not in users:
                users[resource], count[resource] = [], 0
                remaining_bps[resource] = capacity_bps(resource)
            users[resource].append(index)
            count[resource] += times
    waiting = set(range(len(members)))
    level = 0.0
    while count:
        shares = {resource: remaining_bps[resource] / number for resource, number in count.items()}
        level = max(level, min(shares.values()))
        filled: dict[R, int] = {}
        for resource, share in shares.items():
            if share > level:
                continue
            for index in users[resource]:
                if index in waiting:
                    waiting.remove(index)
                    rates[index] = level
                    for used, times in members[index]:
                        filled[used] = filled.get(used, 0) + times
        for resource, number in filled.items():
            remaining_bps[resource] = max(0.0, remaining_bps[resource] - level * number)
            count[resource] -= number
            if not count[resource]:
                del count[resource]
    return rates
