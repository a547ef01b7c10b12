"""Own gradients first, and later what their mean adds to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from farflung.replica.buckets import GradientBuckets
from farflung.replica.in_flight import InFlight
from farflung.replica.merges.merger import Merger
from farflung.types import Merge, State, Transfer

__all__ = ["SwappingGradients"]


class SwappingGradients(Merger):
    """Carries out :class:`farflung.types.SwapGradient`. Without an anchor: replicas stay apart until averaged.

    An exchange starts before the norm of the whole gradient is known, so nothing can be clipped.
    """

    clips: ClassVar[bool] = False

    def __init__(self, merge: Merge, buckets: GradientBuckets) -> None:
        super().__init__(merge, buckets)
        self._sums: dict[int, Tensor] = {}
        """Own gradients since a bucket's last exchange."""

    @property
    @override
    def nbytes(self) -> int:
        return sum(total.nbytes for total in self._sums.values())

    @staticmethod
    @override
    def needs_the_loop(merge: Merge) -> str:
        """A loop's own gradients would be taken for those that were swapped."""
        del merge
        return "swapped gradients cannot be told from gradients that a loop adds up"

    @override
    def filled(self, index: int) -> None:
        own = self._buckets.flat(index)
        self._buckets.load(
            index, own
        )  # what is swapped goes to parameters without a gradient of their own too
        self._sums[index] = self._sums[index].add_(own) if index in self._sums else own.clone()

    @override
    def give(self, index: int, transfer: Transfer, step: int) -> tuple[Tensor, dict[str, Tensor]]:
        del transfer, step
        own = self._sums.pop(index)
        return own.clone(), {"own": own}

    @override
    def put(self, index: int, exchange: InFlight, mean: Tensor | None) -> None:
        """The difference is added to the gradient of this step."""
        gradient = self._buckets.flat(index).sub_(exchange.kept[index]["own"])
        if mean is not None:
            gradient.add_(mean)

    @override
    def steps(self, *, merged: bool, finite: bool) -> bool:
        """Always: a gradient that is not finite has become zero, and what was swapped counts nevertheless."""
        del merged, finite
        return True

    @override
    def diverged(self, *, pending: bool) -> bool:
        del pending
        return True

    @override
    def restart(self) -> None:
        self._sums = {}

    @override
    def state_dict(self) -> tuple[State, State]:
        return {}, {"sums": {str(index): total for index, total in self._sums.items()}}

    @override
    def load_state_dict(self, shared: State, own: State, exchanges: Sequence[InFlight]) -> None:
        del shared, exchanges
        self._sums = {
            int(index): self._buckets.copied(int(index), total) for index, total in own["sums"].items()
        }
