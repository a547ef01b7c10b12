"""The ranks that take part in a collective computed as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from farflung.comm.collectives.segments import sum_in_order
from farflung.tasks import Pending
from farflung.types import Counts

__all__ = ["InOne", "Members"]


@dataclass(frozen=True, slots=True)
class InOne:
    """A rank's part in a collective that is computed as a whole.

    Args:
      result: the sums of tensor and side.
      sent: bytes that this rank sends to each.
      hops: how many the collective has.
    """

    result: Pending[tuple[Tensor, Tensor]]
    sent: Counts
    hops: int


class Members:
    """The ranks' tensors in a collective, and their waits for the sum.

    Args:
      size: the number of ranks.
      add: sums all tensors, in the collective's order.
    """

    def __init__(self, size: int, add: Callable[[list[Tensor]], Tensor] = sum_in_order) -> None:
        self.tensors: list[Tensor] = [torch.empty(0)] * size
        self.sides: list[Tensor] = [torch.empty(0)] * size
        self._add = add
        self._waits: dict[int, Pending[tuple[Tensor, Tensor]]] = {}
        self._sums: tuple[Tensor, Tensor] | None = None
        self.joined = 0
        """The number of ranks that have joined."""

    def join(self, rank: int, tensor: Tensor, side: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        self.tensors[rank], self.sides[rank] = tensor, side
        self._waits[rank] = Pending()
        self.joined += 1
        return self._waits[rank]

    def give(self, ranks: Iterable[int]) -> None:
        """Ends the collective for some ranks: writes the sum, computed once, into each rank's own tensor."""
        if self._sums is None:
            self._sums = self._add(self.tensors), sum_in_order(self.sides)
        total, total_side = self._sums
        for rank in ranks:
            waits = self._waits.pop(rank, None)
            if waits is not None:  # otherwise it has it already
                own = self.tensors[rank]
                own.copy_(total)
                waits.set((own, total_side.clone()))

    @property
    def waiting(self) -> bool:
        return bool(self._waits)

    def fail(self, error: BaseException) -> None:
        for pending in self._waits.values():
            pending.fail(error)
