"""Parameters as an anchor, alike on all replicas, and a replica's own updates that are still pending."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from farflung.replica.buckets import GradientBuckets
from farflung.types import State

__all__ = ["Anchor"]


class Anchor:
    r"""Own updates apply at once; their mean takes their place when it arrives.

    .. math:: w_j = a + \sum_{b} B_{b,j} + u_j

    The anchor a is where all began, plus every mean that has arrived: the same bits on all replicas. Pending are the
    blocks B that are under way and the updates u since the last of them. A swap adds a mean to the anchor, drops its
    block, and computes the parameters anew as the sum, so what rounding did to them is gone with the block.

    Args:
      buckets: of the model whose parameters these are.
    """

    def __init__(self, buckets: GradientBuckets) -> None:
        self._buckets = buckets
        self._anchors = [buckets.weights(bucket.index) for bucket in buckets.buckets]
        self._blocks: list[dict[int, Tensor]] = [{} for _ in buckets.buckets]
        self.fresh = 0
        """Local steps since the last block was closed."""

    @property
    def nbytes(self) -> int:
        """Of all that is held."""
        return sum(t.nbytes for t in self._anchors) + sum(
            block.nbytes for blocks in self._blocks for block in blocks.values()
        )

    def parameters(self) -> dict[str, Tensor]:
        """The anchor, by the names of the parameters."""
        return self._buckets.named(self._anchors)

    def close(self, index: int, step: int) -> Tensor:
        """The updates of a bucket since the last block, which become the block of ``step``."""
        block = self._recent(index)
        self._blocks[index][step] = block
        return block

    def swap(self, index: int, step: int, mean: Tensor | None) -> None:
        """The block of ``step`` gives way to the mean; without one it is taken back."""
        recent = self._recent(index) if self.fresh else None
        del self._blocks[index][step]
        if mean is not None:
            self._anchors[index].add_(mean)
        weights = self._base(index)
        self._buckets.load_weights(index, weights if recent is None else weights.add_(recent))

    def restart(self) -> None:
        """All replicas have come to the same parameters, and nothing is under way."""
        self._anchors = [self._buckets.weights(bucket.index) for bucket in self._buckets.buckets]
        self.fresh = 0

    def state_dict(self) -> State:
        """Without the blocks: the exchanges under way hold them."""
        return {"anchors": {str(i): t for i, t in enumerate(self._anchors)}, "fresh": self.fresh}

    def load_state_dict(self, state: State, blocks: Mapping[tuple[int, int], Tensor]) -> None:
        """Continues from :meth:`state_dict`; ``blocks`` are by bucket and step."""
        self._anchors = [state["anchors"][str(i)].clone() for i in range(len(self._anchors))]
        self.fresh = state["fresh"]
        self._blocks = [{} for _ in self._anchors]
        for (index, step), block in blocks.items():
            self._blocks[index][step] = block

    def _base(self, index: int) -> Tensor:
        total = self._anchors[index].clone()
        for block in self._blocks[index].values():
            total.add_(block)
        return total

    def _recent(self, index: int) -> Tensor:
        if not self.fresh:
            return torch.zeros_like(self._anchors[index])
        return self._buckets.weights(index).sub_(self._base(index))
