"""Merge that replaces local updates by their mean when it arrives."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from farflung.types import Merge, MergeBucket, MergeState, State, get_anchor

__all__ = ["Swap"]


@dataclass(frozen=True, slots=True)
class Swap(Merge):
    r"""Local updates are applied immediately; their mean replaces them when it arrives.

    .. math:: w_j = a + \sum_{b} B_{b,j} + u_j

    The anchor a is the initial parameters plus every mean that has arrived, bit-identical on all ranks. The blocks B in
    flight and the updates u since the last of them are pending. A swap adds a mean to the anchor, drops its block, and
    recomputes the parameters as the sum, so rounding does not accumulate.
    """

    @override
    def init(self, weights: Tensor) -> MergeState:
        return MergeState(weights)

    @override
    def contribute(self, bucket: MergeBucket, state: MergeState, delay: int) -> tuple[Tensor, State]:
        """Returns the local updates since the last contribution."""
        local_update = _compute_uncontributed_updates(bucket, state)
        return local_update.clone(), {"contribution": local_update}

    @override
    def apply(
        self, bucket: MergeBucket, state: MergeState, saved: State, mean: Tensor | None, delay: int
    ) -> None:
        """Replaces the local update by the mean, or only reverts it if ``mean`` is ``None``."""
        recent = _compute_uncontributed_updates(bucket, state, saved) if state.has_updates else None
        if mean is not None:
            get_anchor(state).add_(mean)
        weights = _sum_anchor_and_pending(state)
        bucket.load_weights(weights if recent is None else weights.add_(recent))


def _compute_uncontributed_updates(bucket: MergeBucket, state: MergeState, *oldest: State) -> Tensor:
    """Returns the local updates since the last contribution; zeros if the optimizer has not stepped."""
    if not state.has_updates:
        return torch.zeros_like(get_anchor(state))
    return bucket.copy_weights().sub_(_sum_anchor_and_pending(state, *oldest))


def _sum_anchor_and_pending(state: MergeState, *oldest: State) -> Tensor:
    """Returns the sum of the anchor and all contributions in flight, of which ``oldest`` come first."""
    total = get_anchor(state).clone()
    for saved in (*oldest, *state.pending):
        total.add_(saved["contribution"])
    return total
