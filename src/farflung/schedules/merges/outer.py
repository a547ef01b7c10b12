"""Local updates first, and then a step of an outer optimizer on their mean."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor
from typing_extensions import override

from farflung.moments import check_averaged
from farflung.types import Merge, MergeBucket, MergeState, OptimizerState, State, anchor_of

__all__ = ["Outer"]


@dataclass(frozen=True, slots=True)
class Outer(Merge):
    r"""Local updates are applied at once; an outer optimizer steps on their mean, around an anchor.

    .. math::
        v \leftarrow \mu v + \bar\Delta, \qquad a \leftarrow a + \eta v, \qquad
        w_j \leftarrow (1 - \alpha)\, (a + u_j) + \alpha\, w_j

    with :math:`\Delta_j = w_j - a` when the exchange begins, and :math:`u_j` the updates since then, where those are
    kept or the exchange was due at once; Nesterov's momentum steps on :math:`\bar\Delta + \mu v`. Anchor and v have the
    same bits on all ranks. An exchange without a result leaves both where they are.

    Args:
      rate: of the outer optimizer.
      momentum: its momentum, at least 0 and below 1.
      nesterov: whether that is Nesterov's.
      mix: the share of the rank's own parameters in those that follow, at least 0 and below 1.
      keep: whether updates since the exchange began are added to its result; without it they are lost, but for their
        share in ``mix``.
      optimizer_state: of the inner optimizer: kept, reset, or averaged.
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
            check_averaged(optimizer)

    @override
    def init(self, weights: Tensor) -> MergeState:
        return MergeState(weights)

    @override
    def contribute(self, bucket: MergeBucket, state: MergeState, delay: int) -> tuple[Tensor, State]:
        """Returns the way since the anchor; no copy is saved if the mean is applied before the next step."""
        own = bucket.weights().sub_(anchor_of(state))
        return (own.clone(), {"own": own}) if delay else (own, {})

    @override
    def apply(
        self, bucket: MergeBucket, state: MergeState, saved: State, mean: Tensor | None, delay: int
    ) -> None:
        anchor, since = anchor_of(state), None
        recent = state.has_updates and (self.keep or not delay)
        local = bucket.weights() if recent or self.mix else anchor
        if recent:
            since = local.sub(anchor).sub_(saved["own"])
        if mean is not None:
            anchor.add_(self._direction(state, mean), alpha=self.rate)
        weights = anchor if since is None else since.add_(anchor)
        bucket.load_weights(weights.lerp(local, self.mix) if self.mix else weights)
        state.is_apart = self.mix > 0

    @override
    def last(self) -> Self:
        """Returns the plain mean: outer rate and momentum anticipate steps to come."""
        return replace(self, rate=1.0, momentum=0.0, nesterov=False)

    def _direction(self, state: MergeState, mean: Tensor) -> Tensor:
        if not self.momentum:
            return mean
        if "velocity" in state.shared:
            state.shared["velocity"].mul_(self.momentum).add_(mean)
        else:
            state.shared["velocity"] = mean.clone()
        velocity: Tensor = state.shared["velocity"]
        return mean.add(velocity, alpha=self.momentum) if self.nesterov else velocity
