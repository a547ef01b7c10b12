"""Own updates first, and later their mean in their place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import override

from farflung.replica.buckets import GradientBuckets
from farflung.replica.in_flight import InFlight
from farflung.replica.merges.merger import Merger
from farflung.types import Merge, State, Transfer

__all__ = ["Swapping"]


class Swapping(Merger):
    r"""Carries out :class:`farflung.types.Swap` around an anchor.

    .. math:: w_j = a + \sum_{b} B_{b,j} + u_j

    The anchor a is where all began, plus every mean that has arrived: the same bits on all replicas. Pending are the
    blocks B that are under way and the updates u since the last of them. A swap adds a mean to the anchor, drops its
    block, and computes the parameters anew as the sum, so what rounding did to them is gone with the block.
    """

    def __init__(self, merge: Merge, buckets: GradientBuckets) -> None:
        super().__init__(merge, buckets)
        count = len(buckets.buckets)
        self._anchors = [buckets.weights(index) for index in range(count)]
        self._blocks: list[dict[int, Tensor]] = [{} for _ in range(count)]
        """Those under way, by bucket and by the step that ended them."""
        self._fresh = [0] * count
        """Own steps since a bucket's last block."""

    @property
    @override
    def nbytes(self) -> int:
        return sum(anchor.nbytes for anchor in self._anchors)

    @override
    def updated(self, *, done: bool) -> None:
        self._fresh = [fresh + done for fresh in self._fresh]

    @override
    def give(self, index: int, transfer: Transfer, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """The updates since the last block, which become the block of ``step``."""
        del transfer
        block = self._recent(index)
        self._blocks[index][step] = block
        self._fresh[index] = 0
        return block.clone(), {"own": block}

    @override
    def put(self, index: int, exchange: InFlight, mean: Tensor | None) -> None:
        recent = self._recent(index) if self._fresh[index] else None
        del self._blocks[index][exchange.step]
        if mean is not None:
            self._anchors[index].add_(mean)
        weights = self._base(index)
        self._buckets.load_weights(index, weights if recent is None else weights.add_(recent))

    @override
    def common(self) -> list[Tensor]:
        return self._anchors

    @override
    def restart(self) -> None:
        self._reset_weights(self._anchors)
        self._fresh = [0] * len(self._fresh)

    @override
    def state_dict(self) -> tuple[State, State]:
        """The anchor, which all share, and how many own steps are in no block yet."""
        return {"anchors": {str(i): t for i, t in enumerate(self._anchors)}}, {"fresh": list(self._fresh)}

    @override
    def load_state_dict(self, shared: State, own: State, exchanges: Sequence[InFlight]) -> None:
        self._anchors = [
            self._buckets.copied(i, shared["anchors"][str(i)]) for i in range(len(self._anchors))
        ]
        self._fresh = list(own["fresh"])
        self._blocks = [{} for _ in self._anchors]
        for exchange in exchanges:
            for index, kept in exchange.kept.items():
                self._blocks[index][exchange.step] = kept["own"]

    @override
    def joined(self) -> None:
        self._fresh = [0] * len(self._fresh)

    def _base(self, index: int) -> Tensor:
        total = self._anchors[index].clone()
        for block in self._blocks[index].values():
            total.add_(block)
        return total

    def _recent(self, index: int) -> Tensor:
        if not self._fresh[index]:
            return torch.zeros_like(self._anchors[index])
        return self._buckets.weights(index).sub_(self._base(index))
