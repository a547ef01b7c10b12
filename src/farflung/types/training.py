"""What the parameters are updated by: optimizers, and learning rates that change."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["OptimizerFactory", "RateScaling", "RateSchedule"]


@runtime_checkable
class OptimizerFactory(Protocol):
    """Makes an optimizer of torch's; its own fields are the settings that only it has."""

    def make(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        learning_rate: float,
        momentum: float,
        weight_decay: float,
    ) -> torch.optim.Optimizer:
        """A fresh optimizer of ``parameters``; it may leave out settings that it has no use for."""
        ...


@runtime_checkable
class RateSchedule(Protocol):
    """How the learning rate changes in the course of a run: a pure function of what all replicas have done."""

    @property
    def by(self) -> Literal["steps", "samples"]:
        """What progress is counted in: steps, or samples that all replicas together have drawn."""
        ...

    def factor(self, done: int, total: int) -> float:
        """What the learning rate that was set is multiplied by.

        Args:
          done: steps or samples before the step that the rate is for.
          total: steps or samples in the whole run.
        """
        ...


@runtime_checkable
class RateScaling(Protocol):
    """How a step's learning rate follows the size of its batch."""

    def factor(self, share: float) -> float:
        """What the learning rate of a step is multiplied by.

        Args:
          share: what the step's gradients weigh on average over all replicas: where weights are numbers of samples,
            those of all of them over the run's batch times the number of replicas.
        """
        ...
