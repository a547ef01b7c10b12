"""What a merge asks of a replica."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor

from farflung.replica.buckets import GradientBuckets
from farflung.replica.in_flight import InFlight
from farflung.types import Merge, State, Transfer

__all__ = ["Merger"]


class Merger:
    """Carries one kind of merge out for all buckets of a replica.

    A new one overrides what differs and is named in :data:`farflung.replica.merges.MERGERS`. The methods are called on
    the thread that trains, in the order of a step: :meth:`taking` around forward and backward, for gradients
    :meth:`give` inside backward, :meth:`put` for gradients that are due, :meth:`steps`, the optimizer,
    :meth:`updated`, then :meth:`give` and :meth:`put` for all that is no gradient.

    Args:
      merge: the schedule's; those of single transfers may have other settings.
      buckets: the model's gradients and parameters.
    """

    takes_gradient: ClassVar[bool] = False
    """Whether the optimizer steps on what is merged and nothing else, at steps where such a transfer begins or ends."""

    def __init__(self, merge: Merge, buckets: GradientBuckets) -> None:
        del merge
        self._buckets = buckets

    @property
    def nbytes(self) -> int:
        """Bytes held beside what exchanges under way keep."""
        return 0

    @staticmethod
    def needs_the_loop(merge: Any) -> str:
        """Why :func:`farflung.attach`, which sees neither forward pass nor batches, cannot follow; empty: it can."""
        del merge
        return ""

    def goes_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Once before the first step: the optimizer whose steps are merged with those of others.

        Raises:
          ConfigError: it cannot go with that one; says what to do instead.
        """

    def taking(
        self, optimizer: torch.optim.Optimizer, exchanges: Sequence[InFlight]
    ) -> AbstractContextManager[None]:
        """Around forward and backward; ``exchanges`` are this merge's, oldest first."""
        del optimizer, exchanges
        return nullcontext()

    def give(self, index: int, transfer: Transfer, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        """What a bucket gives to the exchange that begins.

        Returns:
          A flat tensor, given away, and what is kept until the result is merged. Where that is later than this step,
          ``own`` among it is the same numbers, from which a resumed run makes the exchange again.
        """
        raise NotImplementedError

    def put(self, index: int, exchange: InFlight, mean: Tensor | None) -> None:
        """Merges the result of an exchange for one of its buckets; without one the own part is taken back."""
        raise NotImplementedError

    def averages(self, index: int) -> list[Tensor]:
        """What else of a bucket is overwritten with its mean over the replicas, uncompressed, when a result is merged.

        Returns:
          As many of the same shapes on all, in the bucket's dtype.
        """
        del index
        return []

    def steps(self, *, merged: bool, finite: bool) -> bool:
        """Whether the optimizer has a gradient to step on.

        Args:
          merged: whether the last exchange due at this step has brought something.
          finite: whether this replica's own loss is a number.
        """
        del merged
        return finite

    def updated(self, *, done: bool) -> None:
        """The optimizer is through; ``done``: it had a gradient to step on."""

    def diverged(self, *, pending: bool) -> bool:
        """Whether replicas' parameters may differ.

        Args:
          pending: whether there were steps since a part's last exchange, or exchanges are under way; alike on all.
        """
        return pending

    def common(self) -> list[Tensor] | None:
        """The parameters without what is pending, flat by bucket, alike on all; ``None`` where there are none such."""
        return None

    def consensus_parameters(self) -> list[Tensor] | None:
        """What a model is evaluated and kept with while replicas are apart, flat by bucket, alike on all.

        Returns:
          ``None``: the mean of the replicas' parameters.
        """
        return None

    def landed(self) -> None:
        """All that was under way at the end of a run is merged."""

    def _reset_weights(self, kept: list[Tensor]) -> None:
        """Replaces copies of all buckets' parameters by new ones; each is let go before the next is made."""
        for index in range(len(kept)):
            kept[index] = kept[index].new_empty(0)
            kept[index] = self._buckets.weights(index)

    def restart(self) -> None:
        """All replicas have come to the same parameters, and nothing is under way."""

    def joined(self) -> None:
        """The state of another replica was loaded; this one stands at :meth:`common`, and has given nothing."""

    def state_dict(self) -> tuple[State, State]:
        """What is alike on all replicas, and what is this one's own; without what exchanges under way keep."""
        return {}, {}

    def load_state_dict(self, shared: State, own: State, exchanges: Sequence[InFlight]) -> None:
        """Continues from :meth:`state_dict`; ``exchanges`` are this merge's that have started again."""
