"""Own updates first, and then a step of an outer optimizer on what they came to together."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from farflung.replica.buckets import GradientBuckets
from farflung.replica.in_flight import InFlight
from farflung.replica.merges.merger import Merger
from farflung.replica.optimizers import check_averaged, forget, moments
from farflung.types import Outer, State, Transfer

__all__ = ["OuterSteps"]


class OuterSteps(Merger):
    r"""Carries out :class:`farflung.types.Outer` around an anchor, the parameters that all have in common.

    .. math::
        v \leftarrow \mu v + \bar\Delta, \qquad a \leftarrow a + \eta v, \qquad
        w_j \leftarrow (1 - \alpha)\, (a + u_j) + \alpha\, w_j

    with :math:`\Delta_j = w_j - a` when the exchange begins, and :math:`u_j` the own updates since then, where those
    are kept or the exchange was due at once; Nesterov's momentum steps on :math:`\bar\Delta + \mu v`. The anchor a and
    v have the same bits on all replicas. An exchange that brings nothing leaves both where they are.
    """

    def __init__(self, merge: Outer, buckets: GradientBuckets) -> None:
        super().__init__(merge, buckets)
        self._state = merge.state
        self._optimizer: torch.optim.Optimizer | None = None
        self._anchors = self._weights()
        self._speeds: dict[int, Tensor] = {}
        """v of the buckets that have made an outer step with momentum."""
        self._fresh = [False] * len(self._anchors)
        """Whether there were own steps since a bucket's last exchange began."""
        self._mixed = [False] * len(self._anchors)
        """Whether a bucket's last merge has left a share of the own parameters."""
        self._stepped = False
        """Whether the optimizer has just stepped: what is due at once is merged before it steps again."""

    @property
    @override
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (*self._anchors, *self._speeds.values()))

    @override
    def goes_with(self, optimizer: torch.optim.Optimizer) -> None:
        if self._state == "averaged":
            check_averaged(optimizer)
        self._optimizer = optimizer

    @override
    def updated(self, *, done: bool) -> None:
        self._fresh = [fresh or done for fresh in self._fresh]
        self._stepped = done

    @override
    def give(self, index: int, transfer: Transfer, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The way since the anchor; no copy of it is made where it is merged before the next step."""
        own = self._buckets.weights(index).sub_(self._anchors[index])
        self._fresh[index] = False
        at_once = self._stepped and transfer.due_step == step
        return (own, {}) if at_once else (own.clone(), {"own": own})

    @override
    def put(self, index: int, exchange: InFlight, mean: Tensor | None) -> None:
        """The outer step, and the parameters that follow from it."""
        merge = exchange.transfer.merge
        assert isinstance(merge, Outer)
        fresh = self._fresh[index] and (merge.keep or exchange.transfer.due_step == exchange.step)
        local = self._buckets.weights(index) if fresh or merge.mix else self._anchors[index]
        since = local.sub(self._anchors[index]).sub_(exchange.kept[index]["own"]) if fresh else None
        if mean is not None:
            self._step(index, mean, merge)
        weights = self._anchors[index] if since is None else since.add_(self._anchors[index])
        self._buckets.load_weights(index, weights.lerp(local, merge.mix) if merge.mix else weights)
        self._mixed[index] = merge.mix > 0
        if merge.state == "reset":
            assert self._optimizer is not None
            forget(self._optimizer, self._buckets.parameters(index))

    @override
    def averages(self, index: int) -> list[Tensor]:
        if self._state != "averaged":
            return []
        assert self._optimizer is not None
        return moments(self._optimizer, self._buckets.parameters(index))

    @override
    def diverged(self, *, pending: bool) -> bool:
        return pending or any(self._mixed)

    @override
    def common(self) -> list[Tensor]:
        return self._anchors

    @override
    def restart(self) -> None:
        """The parameters are the anchor; the outer momentum goes on."""
        self._reset_weights(self._anchors)
        self._fresh = [False] * len(self._anchors)
        self._mixed = [False] * len(self._anchors)

    @override
    def state_dict(self) -> tuple[State, State]:
        """Anchor and momentum, which all share, and whether there are own steps in no exchange yet."""
        shared: State = {
            "anchors": {str(index): anchor for index, anchor in enumerate(self._anchors)},
            "speeds": {str(index): speed for index, speed in self._speeds.items()},
            "mixed": list(self._mixed),
        }
        return shared, {"fresh": list(self._fresh)}

    @override
    def load_state_dict(self, shared: State, own: State, exchanges: Sequence[InFlight]) -> None:
        del exchanges
        copied = self._buckets.copied
        self._anchors = [copied(index, shared["anchors"][str(index)]) for index in range(len(self._anchors))]
        self._speeds = {int(index): copied(int(index), speed) for index, speed in shared["speeds"].items()}
        self._fresh, self._mixed = list(own["fresh"]), list(shared["mixed"])

    @override
    def joined(self) -> None:
        self._fresh = [False] * len(self._fresh)

    def _step(self, index: int, mean: Tensor, merge: Outer) -> None:
        way = mean
        if merge.momentum:
            if index in self._speeds:
                self._speeds[index].mul_(merge.momentum).add_(mean)
            else:
                self._speeds[index] = mean.clone()
            way = self._speeds[index]
            if merge.nesterov:
                way = mean.add(way, alpha=merge.momentum)
        self._anchors[index].add_(way, alpha=merge.rate)

    def _weights(self) -> list[Tensor]:
        return [self._buckets.weights(bucket.index) for bucket in self._buckets.buckets]
