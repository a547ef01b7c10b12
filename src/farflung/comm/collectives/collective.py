"""What a collective is, beside the coroutine that carries it out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from farflung.network.costs import Cost
from farflung.types import AllReduce

__all__ = ["Collective"]


@dataclass(frozen=True, slots=True)
class Collective:
    """One way to sum a tensor over all ranks; whatever else is known of it is known from here.

    Args:
      run: carries it out by messages.
      cost_s: seconds by the latency-bandwidth model; ``None``: they cannot be predicted.
      messages: how many an exchange of so many ranks has, where no tensor is cut into pieces; ``None``: not known.
      in_rank_order: whether it adds in the order of ranks, so that ``auto`` may take it and changes no bit.
      by_backend: whether the sums are those of the torch.distributed backend. These match by their order, carry no
        codec inside, are not encrypted, and exist on real processes alone.
    """

    run: AllReduce
    cost_s: Cost | None = None
    messages: Callable[[int], int] | None = None
    in_rank_order: bool = False
    by_backend: bool = False
