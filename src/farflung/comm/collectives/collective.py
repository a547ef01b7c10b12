"""Description of a collective, besides its coroutine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from farflung.network.costs import Cost
from farflung.types import AllReduce

__all__ = ["Collective"]


@dataclass(frozen=True, slots=True)
class Collective:
    """A way to sum a tensor over all ranks, with its properties.

    Args:
      run: Coroutine function that sums by messages.
      cost_s: Predicts the duration by the latency-bandwidth model, in seconds; None if it is unpredictable.
      count_messages: Counts the messages of an exchange of ``size`` ranks without pieces; None if unknown.
      is_rank_ordered: True if it adds in the order of ranks, so that ``auto`` may use it without changing a bit.
      is_native: True for collectives of the torch.distributed backend. These match by their order, carry no
        codec inside, are not encrypted, and exist only on real processes.
    """

    run: AllReduce
    cost_s: Cost | None = None
    count_messages: Callable[[int], int] | None = None
    is_rank_ordered: bool = False
    is_native: bool = False
