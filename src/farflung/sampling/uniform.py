"""Uniform sampling without replacement, over any number of replicas."""

from __future__ import annotations

import torch
from torch import Tensor

from farflung.seeding import Passes
from farflung.types import Draw, PoolView, State

__all__ = ["Uniform"]


class Uniform:
    r"""Shuffled passes over the data with one global cursor.

    Position :math:`p` of the endless sequence of passes holds sample :math:`\pi_{\lfloor p/n \rfloor}(p \bmod n)`,
    where :math:`\pi_e` is a permutation drawn from the seed and the pass. At each step rank :math:`r` of :math:`R`
    takes the positions :math:`c + rB` to :math:`c + (r+1)B` and the cursor :math:`c` moves on by :math:`RB`, so each
    sample comes exactly once per pass, whatever the number of replicas and also where it changes.

    Where only part of the data is at hand (a stream with a rate), the oldest samples are taken first.

    Args:
      seed: equal on all replicas.
    """

    def __init__(self, seed: int) -> None:
        self._passes = Passes(seed)
        self._cursor = 0

    def next(self, view: PoolView) -> Draw:
        """This replica's part of the step's samples."""
        if isinstance(view.pool, Tensor):
            return Draw(view.pool[: view.batch_size])
        first = self._cursor + view.rank * view.batch_size
        self._cursor += view.size * view.batch_size
        return Draw(self._at(first, view.batch_size, view.pool))

    def state_dict(self) -> State:
        """The cursor."""
        return {"cursor": self._cursor}

    def load_state_dict(self, state: State) -> None:
        """Continues at the cursor."""
        self._cursor = int(state["cursor"])

    def _at(self, first: int, count: int, n: int) -> Tensor:
        parts = []
        while count > 0:
            index, begin = divmod(first, n)
            part = self._passes.order(index, n)[begin : begin + count]
            parts.append(part)
            first += len(part)
            count -= len(part)
        return parts[0] if len(parts) == 1 else torch.cat(parts)
