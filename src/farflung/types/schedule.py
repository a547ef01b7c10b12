"""Interfaces of schedules, transfers, optimizer factories and learning-rate schedules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias, runtime_checkable

from farflung.types.merge import Merge
from farflung.types.tensors import State, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "Bucket",
    "ForwardTrace",
    "Fragment",
    "OptimizerFactory",
    "RateScaling",
    "RateSchedule",
    "Schedule",
    "SharedStats",
    "SyncUnit",
    "Transfer",
]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Flat run of gradients of one dtype, in backward order; ``index`` 0 is ready first."""

    index: int
    spec: TensorSpec

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """This bucket, as the only one of its unit."""
        return (self,)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Several buckets of one dtype in one exchange, in their order; ``index`` counts fragments."""

    index: int
    buckets: tuple[Bucket, ...]


SyncUnit: TypeAlias = Bucket | Fragment
"""Unit that a transfer moves."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One exchange as data: the unit, the step at whose end its result is due, its merge, and its priority.

    Messages of the exchanges with the lowest priority leave first; ``None`` leaves them in order.
    """

    unit: SyncUnit
    merge_step: int
    merge: Merge
    priority: int | None = field(default=None, kw_only=True)


class ForwardTrace(NamedTuple):
    """Uses of a model's buckets in one forward pass.

    Args:
      order: Indices of the buckets in the order of their first use; unused ones are missing.
      dependencies: Indices of the buckets that each operation needs, directly or through its inputs.
      flops: Floating-point operations of each operation.
    """

    order: tuple[int, ...]
    dependencies: tuple[frozenset[int], ...]
    flops: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class SharedStats:
    """Statistics of a step, equal on all replicas: summed in its exchange, or sent by one decider."""

    step: int
    loss: float
    """Weighted mean loss over all replicas."""
    weight: float
    sums: Mapping[str, float] = field(default_factory=dict)
    """Sums over all ranks of the numbers that extensions add to the metadata, by name."""
    elapsed_s: float | None = None
    """Seconds since the run began on the decider's clock, if requested by the schedule."""
    step_s: float | None = None
    """Seconds of a step of the decider without its waits for exchanges, if requested by the schedule."""
    exchange_s: float | None = None
    """Seconds of an exchange of the decider, if requested by the schedule."""
    learning_rate: float | None = None
    """Learning rate of the optimizer at the step that merges; equal on all ranks under ``farflung train``."""


class Schedule:
    """Plan of the transfers that start at each step and their due steps; it is data, equal on all ranks.

    Implementations override ``merges`` and :meth:`plan`. The defaults fit a schedule that adapts to nothing and waits
    for each result at the step at which its exchange starts.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # at run time a field of a dataclass would take it for its default

        @property
        def merges(self) -> tuple[Merge, ...]:
            """All merges that transfers may use."""

    @property
    def attach_refusal(self) -> str | None:
        """Reason why :func:`farflung.attach` does not support the schedule; None if it does."""
        return None

    @property
    def is_gradient_only(self) -> bool:
        """Returns True if all merges average gradients: the optimizer steps on means only, and ranks never differ."""
        return all(merge.average_target == "gradient" for merge in self.merges)

    @property
    def is_synchronous(self) -> bool:
        """Returns True if the optimizer steps on means of gradients only, each at the step of its gradients."""
        return self.is_gradient_only and not self.has_late_results

    @property
    def has_late_gradients(self) -> bool:
        """Returns True if gradients leave in their backward pass and may be due at a later step."""
        return self.has_late_results and any(merge.average_target == "gradient" for merge in self.merges)

    @property
    def has_late_results(self) -> bool:
        """Returns True if any result may be due at a later step than its exchange starts."""
        return False

    @property
    def has_deferred_updates(self) -> bool:
        """Returns True if the optimizer steps on each bucket's mean when the next forward pass first uses the bucket.

        Every transfer then moves the gradient of a bucket, and is due at the step at which it starts.
        """
        return False

    @property
    def max_steps_ahead(self) -> int:
        """Maximum number of steps begun after the last one whose exchanges are all complete.

        0 if the schedule does not continue when replicas are lost.
        """
        return 0

    @property
    def warmup_steps(self) -> int:
        """Number of first steps whose transfers differ from those of later steps: option ``warmup``, if it exists."""
        return int(getattr(self, "warmup", 0))

    @property
    def cycle_steps(self) -> int:
        """Number of steps after which the transfers repeat, once the warm-up is over."""
        return 1

    def scale_warmup(self, share: float) -> Schedule:
        """Returns the schedule of a run that is ``share`` times as long, with a warm-up as much shorter."""
        if not self.warmup_steps:
            return self
        return replace(self, warmup=round(share * self.warmup_steps))  # type: ignore[type-var]

    def check(self, size: int) -> None:
        """Validates the number of replicas before a run begins.

        Raises:
          ConfigError: the schedule does not support it; the message has an alternative.
        """

    def build_extensions(self, loop: Any) -> Sequence[Any]:
        """Returns the schedule's extensions; see :meth:`farflung.types.Sampler.build_extensions`.

        Raises:
          ConfigError: the run does not support the schedule.
        """
        del loop
        return ()

    def build_units(self, buckets: Sequence[Bucket]) -> Sequence[SyncUnit]:
        """Returns the units that transfers move of a model with these buckets."""
        return buckets

    def init(self) -> State:
        """Returns the state before the first step."""
        return {}

    def record_trace(self, state: State, units: Sequence[SyncUnit], trace: ForwardTrace) -> State:
        """Returns the state after a traced forward pass; called before the first step with deferred updates."""
        del units, trace
        return state

    def plan(self, state: State, units: Sequence[SyncUnit], step: int) -> list[Transfer]:
        """Returns the transfers that start at ``step``, in the order of ``units``; each unit at most once."""
        raise NotImplementedError

    def needs_times(self, state: State, step: int) -> bool:
        """Returns True if stats of exchanges that start at ``step`` need times measured by the deciding rank."""
        del state, step
        return False

    def update_state(self, state: State, stats: SharedStats) -> State:
        """Returns the next state, computed from the stats of a step, which are equal on all ranks."""
        del stats
        return state


@runtime_checkable
class OptimizerFactory(Protocol):
    """Factory of a PyTorch optimizer; its fields are the settings specific to that optimizer."""

    def make(
        self,
        parameters: Sequence[nn.Parameter],
        *,
        learning_rate: float,
        momentum: float,
        weight_decay: float,
    ) -> torch.optim.Optimizer:
        """Returns a new optimizer of ``parameters``; it may ignore settings that it does not use."""
        ...


@runtime_checkable
class RateSchedule(Protocol):
    """Change of the learning rate during a run, a pure function of the progress of all replicas."""

    @property
    def unit(self) -> Literal["steps", "samples"]:
        """Unit of progress: steps, or samples drawn by all replicas."""
        ...

    def compute_factor(self, progress: int, total: int) -> float:
        """Returns the factor by which the configured learning rate is multiplied.

        Args:
          progress: Number of steps or samples before the step.
          total: Number of steps or samples in the whole run.
        """
        ...


@runtime_checkable
class RateScaling(Protocol):
    """Dependence of a step's learning rate on the size of its batch."""

    def compute_factor(self, share: float) -> float:
        """Returns the factor by which the learning rate of a step is multiplied.

        Args:
          share: Mean weight of the step's gradients over all replicas. If weights are numbers of samples, this is the
            total number of samples over the run's batch size times the number of replicas.
        """
        ...
