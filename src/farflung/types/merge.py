"""Merges: how the mean of an exchange takes effect in a bucket."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias

from farflung.types.tensors import State

if TYPE_CHECKING:
    from typing import Self

    import torch
    from torch import Tensor, nn

__all__ = ["Averaged", "Merge", "MergeBucket", "MergeState", "OptimizerState", "anchor_of"]

Averaged: TypeAlias = Literal["gradient", "update", "parameters"]
"""What an exchange averages. Gradients leave as backward fills their buckets and are merged before the optimizer steps;
updates and parameters leave, and are merged, after it.
"""
OptimizerState: TypeAlias = Literal["kept", "reset", "averaged"]
"""What becomes of an optimizer's state for parameters that are merged."""


class MergeBucket(Protocol):
    """A bucket of the model as a merge sees it: flat gradient, flat parameters, the optimizer that steps on them."""

    index: int
    gradient: Tensor
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer | None

    def weights(self) -> Tensor:
        """Returns a flat copy of the parameters."""
        ...

    def load_weights(self, flat: Tensor) -> None:
        """Overwrites the parameters."""
        ...

    def load_gradient(self, mean: Tensor) -> None:
        """Makes ``mean`` the gradient that the optimizer steps on."""
        ...


@dataclass(slots=True)
class MergeState:
    """State of a merge for one bucket between exchanges.

    Args:
      anchor: the parameters without contributions in flight, equal on all ranks; ``None`` if the merge needs none.
      shared: other tensors and numbers that are equal on all ranks, by name.
      local: tensors and numbers of this rank. A joiner starts with what :meth:`Merge.init` makes of the anchor.
      is_apart: whether ranks still differ after the last result was applied; equal on all ranks.
      has_updates: whether the optimizer has stepped since the last contribution; kept by the engine.
      pending: what was saved of each contribution in flight, oldest first; kept by the engine.
    """

    anchor: Tensor | None = None
    shared: State = field(default_factory=dict)
    local: State = field(default_factory=dict)
    is_apart: bool = False
    has_updates: bool = False
    pending: list[State] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Bytes held beside what exchanges in flight have saved."""
        tensors: list[Tensor] = [*self.shared.values(), *self.local.values()]
        if self.anchor is not None:
            tensors.append(self.anchor)
        return sum(tensor.nbytes for tensor in tensors)


class Merge:
    """How a mean takes effect: frozen settings with JSON values, to which state is passed in, as to a codec.

    A merge derives from this and gives :meth:`contribute` and :meth:`apply`. Unlike a codec it changes its state in
    place: anchors are as large as the model.
    """

    __slots__ = ()
    moves: ClassVar[Averaged] = "update"
    """What its exchanges average."""
    evaluates_anchor: ClassVar[bool] = False
    """Whether the anchor is evaluated and saved while ranks differ, and not the mean of their parameters."""
    if TYPE_CHECKING:

        @property
        def optimizer_state(self) -> OptimizerState:
            """What becomes of the optimizer's state of a merged bucket."""
    else:
        optimizer_state = "kept"

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses an optimizer before the first step.

        Raises:
          ConfigError: says what to do instead.
        """

    def init(self, weights: Tensor) -> MergeState:
        """Returns the state of a bucket with parameters ``weights``, equal on all ranks; takes them over."""
        del weights
        return MergeState()

    def contribute(self, bucket: MergeBucket, state: MergeState, delay: int) -> tuple[Tensor, State]:
        """Returns the flat tensor to average, which is given away, and what to save until :meth:`apply`.

        Args:
          bucket: to take it from.
          state: of the merge for this bucket; changed in place.
          delay: steps of the optimizer before the mean is applied. Unless it is 0, ``own`` among what is saved equals
            the tensor: a resumed run repeats the exchange from it.
        """
        raise NotImplementedError

    def apply(
        self, bucket: MergeBucket, state: MergeState, saved: State, mean: Tensor | None, delay: int
    ) -> None:
        """Applies the mean to a bucket, or takes the rank's own contribution back if ``mean`` is ``None``."""
        raise NotImplementedError

    def finish(self, bucket: MergeBucket, state: MergeState) -> None:
        """Completes what is half done once nothing is in flight at the end of a run."""

    def last(self) -> Self:
        """Returns the merge for a result that no training step follows."""
        return self


def anchor_of(state: MergeState) -> Tensor:
    """Returns the anchor of a merge that has one."""
    assert state.anchor is not None
    return state.anchor
