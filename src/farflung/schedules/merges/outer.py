"""Merge that steps an outer optimizer on the mean of local updates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from farflung.comm.pool import allocate_like
from farflung.moments import check_averageable
from farflung.types import Merge, MergeBucket, MergeState, OptimizerState, State, get_anchor

__all__ = ["Outer"]


@dataclass(frozen=True, slots=True)
class Outer(Merge):
    r"""Local updates are applied immediately; an outer optimizer steps on their mean, around an anchor.

    .. math::
        v \leftarrow \mu v + \bar\Delta, \qquad a \leftarrow a + \eta v, \qquad
        w_j \leftarrow (1 - \alpha)\, (a + u_j) + \alpha\, w_j

    Here :math:`\Delta_j = w_j - a` when the exchange begins. :math:`u_j` are the updates since then, if they are kept
    or the exchange was due immediately. Nesterov momentum steps on :math:`\bar\Delta + \mu v`. Anchor and v are
    bit-identical on all ranks, and unchanged by an exchange without a result.

    Args:
      rate: Learning rate of the outer optimizer.
      momentum: Momentum of the outer optimizer, at least 0 and below 1.
      nesterov: True for Nesterov momentum.
      mix: Share of the rank's own parameters in the result, at least 0 and below 1.
      keep: True to add updates since the exchange began to its result; otherwise only their share in ``mix`` remains.
      optimizer_state: State of the inner optimizer: kept, reset, or averaged.
    """

    rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    mix: float = 0.0
    keep: bool = False
    optimizer_state: OptimizerState = "kept"

    @override
    def check(self, optimizer: torch.optim.Optimizer) -> None:
        if self.optimizer_state == "averaged":
            check_averageable(optimizer, "use optimizer_state='kept' or 'reset'")

    @override
    def init(self, weights: Tensor) -> MergeState:
        return MergeState(weights)

    @override
    def contribute(self, bucket: MergeBucket, state: MergeState, delay: int) -> tuple[Tensor, State]:
        """Returns the change since the anchor.

        If the mean is applied before the next step, no copy is saved, and the change takes the memory of the gradient,
        on which the optimizer has stepped.
        """
        anchor = get_anchor(state)
        if not delay:
            return bucket.copy_weights(bucket.gradient).sub_(anchor), {}
        update = bucket.copy_weights().sub_(anchor)
        return update.clone(), {"contribution": update}

    @override
    def apply(
        self, bucket: MergeBucket, state: MergeState, saved: State, mean: Tensor | None, delay: int
    ) -> None:
        anchor, recent = get_anchor(state), None
        has_recent = state.has_updates and (self.keep or not delay)
        local = bucket.copy_weights() if has_recent or self.mix else anchor
        if has_recent:
            recent = local.sub(anchor).sub_(saved["contribution"])
        if mean is not None:
            anchor.add_(self._compute_direction(state, mean), alpha=self.rate)
        weights = anchor if recent is None else recent.add_(anchor)
        bucket.load_weights(weights.lerp(local, self.mix) if self.mix else weights)
        state.has_diverged = self.mix > 0

    @override
    def as_final(self) -> Self:
        """Returns the plain mean, since outer rate and momentum anticipate later steps."""
        return replace(self, rate=1.0, momentum=0.0, nesterov=False)

    def _compute_direction(self, state: MergeState, mean: Tensor) -> Tensor:
        if not self.momentum:
            return mean
        if "velocity" in state.shared:
            state.shared["velocity"].mul_(self.momentum).add_(mean)
        else:
            state.shared["velocity"] = mean.clone()
        velocity: Tensor = state.shared["velocity"]
        if not self.nesterov:
            return velocity
        return torch.add(mean, velocity, alpha=self.momentum, out=allocate_like(mean))
