"""The schedule of post-local SGD: synchronous first, local later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from farflung.options import whole_option
from farflung.schedules.fixed import Fixed
from farflung.schedules.options import state_option
from farflung.types import Merge, Outer, Part, Replace, State, Transfer
from farflung.types.schedule import OptimizerState

__all__ = ["PostLocalSGD"]


@dataclass(frozen=True, slots=True)
class PostLocalSGD(Fixed):
    """Synchronous SGD for the first ``until`` steps, and from there on :class:`farflung.schedules.LocalSGD`.

    Early in a training gradients change fast, and blocks of local steps cost most. Late in it, at a small learning
    rate, they cost little, and may find minima that generalize better.

    Args:
      until: steps that are synchronous, best until the learning rate first falls.
      sync_every: H, steps between two exchanges after them, counted from ``until``.
      optimizer_state: see :class:`farflung.schedules.LocalSGD`.

    Raises:
      ConfigError: an option out of its range.

    References: Lin et al. 2020, Alg. 1; their examples have H = 16 from the first fall of the learning rate on, and
    keep momentum local.
    """

    until: int = 1000
    sync_every: int = 16
    optimizer_state: OptimizerState = "kept"

    def __post_init__(self) -> None:
        whole_option("post_local_sgd", "until", self.until, 0)
        whole_option("post_local_sgd", "sync_every", self.sync_every, 1)
        state_option("post_local_sgd", self.optimizer_state)

    @property
    def merges(self) -> tuple[Merge, ...]:
        """Gradients replaced by their mean, and later parameters by theirs."""
        return (Replace(), Outer(state=self.optimizer_state))

    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        """One transfer for each bucket, at every step and later at the end of a block."""
        del state
        at_once, of_block = self.merges
        if step < self.until:
            return [Transfer(part, step, at_once) for part in parts]
        if (step + 1 - self.until) % self.sync_every:
            return []
        return [Transfer(part, step, of_block) for part in parts]
