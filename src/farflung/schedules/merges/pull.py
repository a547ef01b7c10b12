"""Merge that pulls parameters towards an anchor, which their means move."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.errors import ConfigError
from farflung.moments import get_momentum
from farflung.types import Merge, MergeBucket, MergeState, State, get_anchor

__all__ = ["Pull", "compute_step_share"]


def compute_step_share(momentum: float, delay: int, period: int = 1) -> float:
    r"""Returns the share :math:`\rho` of the distance to the anchor that a step removes.

    .. math:: \rho = \min\left(1 - \mu, \frac{1}{D + K + 1}\right), \qquad \rho = 1 \text{ at } D = 0

    Below the first term replicas stay together, and below the second their mean is stable, nearly up to the learning
    rate of synchronous SGD; see :class:`farflung.schedules.Delayed`. Replicas learn better the less they differ, so
    :math:`\rho` is as large as possible. The rule is ours.

    Args:
      momentum: :math:`\mu`, at least 0 and below 1; for Adam its first beta.
      delay: D, number of steps between the start of an exchange and its use.
      period: K, number of steps in a block.
    """
    return min(1 - momentum, 1 / (delay + period + 1)) if delay else 1.0


@dataclass(frozen=True, slots=True)
class Pull(Merge):
    r"""Local updates are applied immediately; their mean moves an anchor, towards which parameters are pulled.

    .. math::
        a \leftarrow a + \bar B, \qquad s_j \leftarrow s_j + \rho_K (a - s_j), \qquad w_j = s_j + u_j, \qquad
        \rho_K = 1 - (1 - \rho)^K

    The anchor a is the initial parameters plus every mean that has arrived, bit-identical on all ranks. :math:`s_j` is
    the parameters with the last contributed block, and :math:`u_j` the updates since.

    Args:
      share: Share of the distance to the anchor that a step removes, above 0 and at most 1; ``None`` to compute it from
        the optimizer's momentum and the delay, see :func:`compute_step_share`.
      period: Number of steps between two exchanges of a unit.
    """

    should_evaluate_anchor: ClassVar[bool] = True

    share: float | None = None
    period: int = 1

    @override
    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Rejects an optimizer with momentum of 1 or more."""
        momentum = get_momentum(optimizer)
        if momentum >= 1:
            raise ConfigError(
                f"delayed(pull=...): momentum {momentum:g}: must be below 1, or no pull keeps replicas together"
            )

    @override
    def init(self, weights: Tensor) -> MergeState:
        return MergeState(weights, local={"base": weights.clone()})

    @override
    def contribute(self, bucket: MergeBucket, state: MergeState, delay: int) -> tuple[Tensor, State]:
        """Returns the updates since the last contribution; ``saved`` has the share not yet removed by pulls."""
        weights = bucket.copy_weights()
        local_update = weights - state.local["base"]
        state.local["base"] = weights
        return local_update.clone(), {"contribution": local_update, "remaining_share": 1.0}

    @override
    def apply(
        self, bucket: MergeBucket, state: MergeState, saved: State, mean: Tensor | None, delay: int
    ) -> None:
        """Moves the anchor, or reverts the local update if ``mean`` is ``None``; then pulls towards the anchor."""
        recent = _compute_recent(bucket, state)
        if mean is None:
            state.local["base"].sub_(saved["contribution"], alpha=saved["remaining_share"])
        else:
            get_anchor(state).add_(mean)
        share = self.share
        if share is None:
            assert bucket.optimizer is not None
            share = compute_step_share(get_momentum(bucket.optimizer), delay, self.period)
        _pull_bucket(bucket, state, 1 - (1 - share) ** self.period, recent)

    @override
    def finish(self, bucket: MergeBucket, state: MergeState) -> None:
        if state.has_diverged:
            _pull_bucket(bucket, state, 1.0, _compute_recent(bucket, state))


def _compute_recent(bucket: MergeBucket, state: MergeState) -> Tensor | None:
    """Returns the updates since the last contribution, if there are any."""
    return bucket.copy_weights().sub_(state.local["base"]) if state.has_updates else None


def _pull_bucket(bucket: MergeBucket, state: MergeState, share: float, recent: Tensor | None) -> None:
    contributed = state.local["base"].lerp_(get_anchor(state), share)
    for saved in state.pending:
        saved["remaining_share"] *= 1 - share
    state.has_diverged = share < 1
    bucket.load_weights(contributed if recent is None else contributed + recent)
