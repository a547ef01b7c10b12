"""Local updates first, and a pull towards where their means have led."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from typing_extensions import override

from farflung.errors import ConfigError
from farflung.moments import momentum_of
from farflung.types import Merge, MergeBucket, MergeState, State, anchor_of

__all__ = ["Pull", "share_of_a_step"]


def share_of_a_step(momentum: float, delay: int, period: int = 1) -> float:
    r"""Returns the share :math:`\rho` of the way to the anchor that is gone in a step.

    .. math:: \rho = \min\left(1 - \mu, \frac{1}{D + K + 1}\right), \qquad \rho = 1 \text{ at } D = 0

    Replicas stay together below the first, and their mean below the second, nearly up to the learning rate of
    synchronous SGD: see :class:`farflung.schedules.Delayed`. The less they differ, the better they learn, so it is as
    large as that allows. The rule is ours.

    Args:
      momentum: :math:`\mu`, at least 0 and below 1; for Adam its first beta.
      delay: D, steps between the start of an exchange and its use.
      period: K, steps in a block.
    """
    return min(1 - momentum, 1 / (delay + period + 1)) if delay else 1.0


@dataclass(frozen=True, slots=True)
class Pull(Merge):
    r"""Local updates are applied at once; their mean moves an anchor, and parameters are pulled towards that.

    .. math::
        a \leftarrow a + \bar B, \qquad s_j \leftarrow s_j + \rho_K (a - s_j), \qquad w_j = s_j + u_j, \qquad
        \rho_K = 1 - (1 - \rho)^K

    The anchor a is where all ranks began, plus every mean that has arrived: the same bits on all. :math:`s_j` is the
    parameters with the last block that was contributed, and :math:`u_j` the updates since.

    Args:
      share: of the way to the anchor that is gone in a step, above 0 and at most 1; ``None``: by the optimizer's
        momentum and the delay, see :func:`share_of_a_step`.
      period: steps between two exchanges of a part.
    """

    evaluates_anchor: ClassVar[bool] = True

    share: float | None = None
    period: int = 1

    @override
    def check(self, optimizer: torch.optim.Optimizer) -> None:
        momentum = momentum_of(optimizer)
        if momentum >= 1:
            raise ConfigError(
                f"delayed(pull=...): momentum {momentum:g}: must be below 1, or no pull keeps replicas together"
            )

    @override
    def init(self, weights: Tensor) -> MergeState:
        return MergeState(weights, local={"given": weights.clone()})

    @override
    def contribute(self, bucket: MergeBucket, state: MergeState, delay: int) -> tuple[Tensor, State]:
        """Returns the updates since the last block; ``left`` is the share of the block that pulls have left in s."""
        weights = bucket.weights()
        block = weights - state.local["given"]
        state.local["given"] = weights
        return block.clone(), {"own": block, "left": 1.0}

    @override
    def apply(
        self, bucket: MergeBucket, state: MergeState, saved: State, mean: Tensor | None, delay: int
    ) -> None:
        recent = _recent(bucket, state)
        if mean is None:
            state.local["given"].sub_(saved["own"], alpha=saved["left"])
        else:
            anchor_of(state).add_(mean)
        share = self.share
        if share is None:
            assert bucket.optimizer is not None
            share = share_of_a_step(momentum_of(bucket.optimizer), delay, self.period)
        _pull(bucket, state, 1 - (1 - share) ** self.period, recent)

    @override
    def finish(self, bucket: MergeBucket, state: MergeState) -> None:
        if state.is_apart:
            _pull(bucket, state, 1.0, _recent(bucket, state))


def _recent(bucket: MergeBucket, state: MergeState) -> Tensor | None:
    """Returns the updates since the last block, if there are any."""
    return bucket.weights().sub_(state.local["given"]) if state.has_updates else None


def _pull(bucket: MergeBucket, state: MergeState, share: float, recent: Tensor | None) -> None:
    given = state.local["given"].lerp_(anchor_of(state), share)
    for block in state.pending:
        block["left"] *= 1 - share
    state.is_apart = share < 1
    bucket.load_weights(given if recent is None else given + recent)
