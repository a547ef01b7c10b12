"""Own updates first, and a pull towards where their means have led."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from farflung.errors import ConfigError
from farflung.replica.buckets import GradientBuckets
from farflung.replica.in_flight import InFlight
from farflung.replica.merges.merger import Merger
from farflung.replica.optimizers import momentum_of
from farflung.types import Pull, State, Transfer

__all__ = ["Pulling", "share_of_a_step"]


def share_of_a_step(momentum: float, delay: int, period: int = 1) -> float:
    r"""The share :math:`\rho` of the way to the anchor that is gone in a step.

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


class Pulling(Merger):
    r"""Carries out :class:`farflung.types.Pull` around an anchor.

    .. math::
        a \leftarrow a + \bar B, \qquad s_j \leftarrow s_j + \rho_K (a - s_j), \qquad w_j = s_j + u_j, \qquad
        \rho_K = 1 - (1 - \rho)^K

    The anchor a is where all began, plus every mean that has arrived: the same bits on all replicas. :math:`s_j` is
    what a replica has come to with the last block that it has given away, and :math:`u_j` are its updates since.
    """

    def __init__(self, merge: Pull, buckets: GradientBuckets) -> None:
        super().__init__(merge, buckets)
        self._optimizer: torch.optim.Optimizer | None = None
        self._anchors = self._weights()
        self._given = self._weights()
        """The parameters with all blocks that were given away, by bucket."""
        self._fresh = [False] * len(self._anchors)
        """Whether there were own steps since a bucket's last block."""
        self._left: list[dict[int, float]] = [{} for _ in self._anchors]
        """The share of each block under way that pulls have left in the parameters, by the step that ended it."""
        self._leans = [False] * len(self._anchors)
        """Whether a bucket's last pull has left a part of the way."""

    @property
    @override
    def nbytes(self) -> int:
        """Of the anchor and of the parameters without recent updates."""
        return sum(tensor.nbytes for tensor in (*self._anchors, *self._given))

    @override
    def goes_with(self, optimizer: torch.optim.Optimizer) -> None:
        momentum = momentum_of(optimizer)
        if momentum >= 1:
            raise ConfigError(
                f"delayed(pull=...): momentum {momentum:g}: must be below 1, or no pull keeps replicas together"
            )
        self._optimizer = optimizer

    @override
    def updated(self, *, done: bool) -> None:
        self._fresh = [fresh or done for fresh in self._fresh]

    @override
    def give(self, index: int, transfer: Transfer, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The updates since the last block, which become the block of ``step``."""
        del transfer
        weights = self._buckets.weights(index)
        block = weights - self._given[index]
        self._given[index] = weights
        self._fresh[index] = False
        self._left[index][step] = 1.0
        return block.clone(), {"own": block}

    @override
    def put(self, index: int, exchange: InFlight, mean: Tensor | None) -> None:
        """The mean moves the anchor, and all is pulled; without one, what is left of the own block goes before."""
        recent = self._recent(index)
        left = self._left[index].pop(exchange.step)
        if mean is None:
            self._given[index].sub_(exchange.kept[index]["own"], alpha=left)
        else:
            self._anchors[index].add_(mean)
        self._pull(index, self._share(exchange), recent)

    @override
    def diverged(self, *, pending: bool) -> bool:
        return pending or any(self._leans)

    @override
    def common(self) -> list[Tensor]:
        return self._anchors

    @override
    def consensus_parameters(self) -> list[Tensor]:
        return self._anchors

    @override
    def landed(self) -> None:
        for index, leans in enumerate(self._leans):
            if leans:
                self._pull(index, 1.0, self._recent(index))

    @override
    def restart(self) -> None:
        self._reset_weights(self._anchors)
        self._reset_weights(self._given)
        self._fresh = [False] * len(self._anchors)
        self._left = [{} for _ in self._anchors]
        self._leans = [False] * len(self._anchors)

    @override
    def state_dict(self) -> tuple[State, State]:
        """The anchor, which all share; what was pulled here, and what is left in it of blocks under way."""
        shared = {"anchors": _by_bucket(self._anchors), "leans": list(self._leans)}
        left = [{str(step): share for step, share in blocks.items()} for blocks in self._left]
        return shared, {"given": _by_bucket(self._given), "fresh": list(self._fresh), "left": left}

    @override
    def load_state_dict(self, shared: State, own: State, exchanges: Sequence[InFlight]) -> None:
        del exchanges
        numbers, copied = range(len(self._anchors)), self._buckets.copied
        self._anchors = [copied(index, shared["anchors"][str(index)]) for index in numbers]
        self._given = [copied(index, own["given"][str(index)]) for index in numbers]
        self._fresh, self._leans = list(own["fresh"]), list(shared["leans"])
        self._left = [{int(step): share for step, share in blocks.items()} for blocks in own["left"]]

    @override
    def joined(self) -> None:
        self._given = [anchor.clone() for anchor in self._anchors]
        self._fresh = [False] * len(self._fresh)

    def _recent(self, index: int) -> Tensor | None:
        """The updates since a bucket's last block, where there are any."""
        return self._buckets.weights(index).sub_(self._given[index]) if self._fresh[index] else None

    def _pull(self, index: int, share: float, recent: Tensor | None) -> None:
        given = self._given[index].lerp_(self._anchors[index], share)
        self._left[index] = {step: (1 - share) * left for step, left in self._left[index].items()}
        self._leans[index] = share < 1
        self._buckets.load_weights(index, given if recent is None else given + recent)

    def _share(self, exchange: InFlight) -> float:
        """Of the way that a pull goes, by the delay that the exchange was planned with."""
        merge = exchange.transfer.merge
        assert isinstance(merge, Pull)
        share = merge.share
        if share is None:
            assert self._optimizer is not None
            delay = exchange.transfer.due_step - exchange.step
            share = share_of_a_step(momentum_of(self._optimizer), delay, merge.period)
        return 1 - (1 - share) ** merge.period

    def _weights(self) -> list[Tensor]:
        return [self._buckets.weights(bucket.index) for bucket in self._buckets.buckets]


def _by_bucket(tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    return {str(index): tensor for index, tensor in enumerate(tensors)}
