"""Uniform sampling without replacement, and batches in shares that a gradient code weighs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from farflung.seeding import Passes
from farflung.types import Draw, PoolView, Sampler, State

if TYPE_CHECKING:
    from farflung.gradient_coding import GradientCode

__all__ = ["InShares", "Uniform"]


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
        return {"cursor": self._cursor}

    def load_state_dict(self, state: State) -> None:
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


class InShares:
    r"""Draws the shares that a replica's row of a gradient code names, each as the replica of its number draws a batch.

    So replicas agree about a share without a message, and all n of them are the step's batch without a code. A mean
    over k shares is taken with the weights :math:`k B_{ij}`, so it is the replica's coded sum of the shares' means.

    Args:
      sampler: draws a share; gives no weights, and draws for any rank.
      code: for a number of replicas.
    """

    def __init__(self, sampler: Sampler, code: Callable[[int], GradientCode]) -> None:
        self._sampler, self._code = sampler, code

    def next(self, view: PoolView) -> Draw:
        """This replica's shares of the step."""
        code, before = self._code(view.size), self._sampler.state_dict()
        shares, ids = code.shares[view.rank], []
        for share in shares:
            self._sampler.load_state_dict(before)
            ids.append(self._sampler.next(replace(view, rank=share)).ids)
        weights = len(shares) * code.coefficients(view.rank)
        return Draw(torch.cat(ids), weights.repeat_interleave(len(ids[0])), weight=1.0, shares=shares)

    def state_dict(self) -> State:
        return self._sampler.state_dict()

    def load_state_dict(self, state: State) -> None:
        self._sampler.load_state_dict(state)
