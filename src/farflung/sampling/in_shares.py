"""Batches of several replicas' samples, weighed by a gradient code."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from farflung.gradient_coding import GradientCode
from farflung.types import Draw, PoolView, Sampler, State

__all__ = ["InShares"]


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
        """The sampler's."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: State) -> None:
        """The sampler's."""
        self._sampler.load_state_dict(state)
