"""Interfaces of merges: how a bucket takes the mean of an exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias

from farflung.types.tensors import State

if TYPE_CHECKING:
    from typing import Self

    import torch
    from torch import Tensor, nn

__all__ = ["AverageTarget", "Merge", "MergeBucket", "MergeState", "OptimizerState", "get_anchor"]

AverageTarget: TypeAlias = Literal["gradient", "update", "parameters"]
"""Quantity that an exchange averages. Gradients leave as backward fills their buckets and are merged before the
optimizer steps. Updates and parameters leave and are merged after it.
"""
OptimizerState: TypeAlias = Literal["kept", "reset", "averaged"]
"""Treatment of an optimizer's state for parameters that are merged."""


class MergeBucket(Protocol):
    """Bucket as seen by a merge: flat gradient, flat parameters and their optimizer."""

    index: int
    gradient: Tensor
    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer | None

    def copy_weights(self, out: Tensor | None = None) -> Tensor:
        """Returns a flat copy of the parameters, in ``out`` if it is given."""
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
      anchor: Parameters without contributions in flight, equal on all ranks; ``None`` if the merge needs none.
      shared: Other tensors and numbers that are equal on all ranks, by name.
      local: Tensors and numbers of this rank. A joiner starts with those that :meth:`Merge.init` derives from the
        anchor.
      has_diverged: True if ranks still differ after the last result was applied; equal on all ranks.
      has_updates: True if the optimizer has stepped since the last contribution; set by the engine.
      pending: Saved state of each contribution in flight, oldest first; set by the engine.
    """

    anchor: Tensor | None = None
    shared: State = field(default_factory=dict)
    local: State = field(default_factory=dict)
    has_diverged: bool = False
    has_updates: bool = False
    pending: list[State] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        """Number of bytes in the state, without those saved for exchanges in flight."""
        tensors: list[Tensor] = [*self.shared.values(), *self.local.values()]
        if self.anchor is not None:
            tensors.append(self.anchor)
        return sum(tensor.nbytes for tensor in tensors)


class Merge:
    """Rule by which a mean takes effect: frozen settings with JSON values, to which state is passed in, as to a codec.

    A merge overrides :meth:`contribute` and :meth:`apply`. Unlike a codec it changes its state in place, since anchors
    are as large as the model.
    """

    __slots__ = ()
    average_target: ClassVar[AverageTarget] = "update"
    """Quantity that its exchanges average."""
    should_evaluate_anchor: ClassVar[bool] = False
    """True if the anchor, not the mean of the parameters, is evaluated and saved while ranks differ."""
    if TYPE_CHECKING:

        @property
        def optimizer_state(self) -> OptimizerState:
            """Treatment of the optimizer's state of a merged bucket."""
    else:
        optimizer_state = "kept"

    def check(self, optimizer: torch.optim.Optimizer) -> None:
        """Validates an optimizer before the first step.

        Raises:
          ConfigError: the merge does not support it; the message has an alternative.
        """

    def init(self, weights: Tensor) -> MergeState:
        """Returns the initial state, which may keep the tensor ``weights``; its values are equal on all ranks."""
        del weights
        return MergeState()

    def contribute(self, bucket: MergeBucket, state: MergeState, delay: int) -> tuple[Tensor, State]:
        """Returns the flat tensor to average, which is given away, and ``saved`` for :meth:`apply`.

        Args:
          bucket: Bucket to average.
          state: State of the merge for this bucket; changed in place.
          delay: Number of optimizer steps before the mean is applied. Unless it is 0, ``contribution`` in the saved
            state equals the tensor, from which a resumed run repeats the exchange.
        """
        raise NotImplementedError

    def apply(
        self, bucket: MergeBucket, state: MergeState, saved: State, mean: Tensor | None, delay: int
    ) -> None:
        """Applies the mean to a bucket; if ``mean`` is ``None``, reverts the rank's own contribution."""
        raise NotImplementedError

    def finish(self, bucket: MergeBucket, state: MergeState) -> None:
        """Completes a partial merge at the end of a run, when nothing is in flight."""

    def as_final(self) -> Self:
        """Returns the merge for a result that no training step follows."""
        return self


def get_anchor(state: MergeState) -> Tensor:
    """Returns the anchor of a merge; asserts that it has one."""
    assert state.anchor is not None
    return state.anchor
