"""What a merge asks of a replica."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel
from farflung.replica.buckets import GradientBuckets
from farflung.replica.in_flight import Carrier, InFlight
from farflung.types import Merge, Runtime, State, Transfer

if TYPE_CHECKING:
    from farflung.replica.stopping import StopAgreement

__all__ = ["Merger"]


class Merger:
    """Carries one kind of merge out for all buckets of a replica.

    A new one overrides what differs and is named in :data:`farflung.replica.merges.MERGERS`. The methods are called on
    the thread that trains, in the order of a step: :meth:`taking` around forward and backward, :meth:`filled` and, for
    gradients, :meth:`give` inside backward, :meth:`put` for gradients that are due, :meth:`steps`, the optimizer,
    :meth:`updated`, then :meth:`give` and :meth:`put` for all that is no gradient.

    Args:
      merge: the schedule's; those of single transfers may have other settings.
      buckets: the model's gradients and parameters.
    """

    takes_gradient: ClassVar[bool] = False
    """Whether the optimizer steps on what is merged and nothing else, at steps where such a transfer begins or ends."""
    clips: ClassVar[bool] = True
    """Whether the gradient that the optimizer steps on may be clipped."""
    takes_whole: ClassVar[str] = ""
    """What becomes of what it moves where its own carrier takes that in place of a recipe's members; empty: they do."""
    by_server: ClassVar[bool] = False
    """Whether its exchanges go by a server, so that no result is a mean of one step, and none can be skipped."""
    rank_0_stands: ClassVar[bool] = False
    """Whether what :meth:`consensus_parameters` says is rank 0's, and the others' are not alike."""

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

    def carrier(
        self,
        runtime: Runtime,
        rider: int,
        seed: int,
        steps: int | None,
        meets: Callable[[int], bool],
        stop: StopAgreement | None,
    ) -> Carrier | None:
        """Once before :meth:`opens`: what carries its exchanges where the run's reducer does not.

        Args:
          runtime: the world.
          rider: how many numbers ride beside each exchange.
          seed: of the run.
          steps: of the run, where that is known.
          meets: whether all replicas have to be alike after so many steps.
          stop: agrees on the last step where the run is asked to stop; ``None``: it never is.
        """
        del runtime, rider, seed, steps, meets, stop
        return None

    @property
    def channels(self) -> Sequence[ExchangeChannel]:
        """Of what was sent for exchanges that this replica has not begun."""
        return ()

    def opens(self, step: int) -> None:
        """Before each step."""

    def ahead(self, step: int) -> bool:
        """After :meth:`opens`: whether what the step's exchanges bring is there before it has begun."""
        del step
        return False

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

    def filled(self, index: int) -> None:
        """The own gradient of a bucket is there."""

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
