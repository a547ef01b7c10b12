"""Merge that replaces local gradients by their mean."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor
from typing_extensions import override

from farflung.types import AverageTarget, Merge, MergeBucket, MergeState, State

__all__ = ["Replace"]


@dataclass(frozen=True, slots=True)
class Replace(Merge):
    r"""The optimizer steps on the mean gradient, or skips the step if no mean is due.

    All ranks apply equal means in equal order and never differ.

    Args:
      correction: :math:`\lambda`; the mean :math:`\bar g`, computed at older parameters :math:`w'`, is applied as
        :math:`\bar g + \lambda\, \bar g \odot \bar g \odot (w - w')`.
    """

    average_target: ClassVar[AverageTarget] = "gradient"

    correction: float = 0.0

    @override
    def contribute(self, bucket: MergeBucket, state: MergeState, delay: int) -> tuple[Tensor, State]:
        """Returns the gradient itself if it is due immediately, otherwise a copy; and ``saved`` for :meth:`apply`."""
        if not delay:
            return bucket.gradient, {}
        saved = {"contribution": bucket.gradient.clone()}
        if self.correction:
            saved["weights"] = bucket.copy_weights()
        return saved["contribution"].clone(), saved

    @override
    def apply(
        self, bucket: MergeBucket, state: MergeState, saved: State, mean: Tensor | None, delay: int
    ) -> None:
        if mean is None:
            return
        if "weights" in saved:
            mean = mean + self.correction * mean * mean * bucket.copy_weights().sub_(saved["weights"])
        bucket.load_gradient(mean)
