"""Schedules, transfers as data; and what updates parameters: optimizers, and learning rates that change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias, runtime_checkable

from farflung.types.merge import Merge
from farflung.types.tensors import State, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "Bucket",
    "Fragment",
    "OptimizerFactory",
    "Part",
    "RateScaling",
    "RateSchedule",
    "Schedule",
    "SharedStats",
    "Transfer",
]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat run of gradients of one dtype, in backward order; ``index`` 0 is ready first."""

    index: int
    spec: TensorSpec

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """Itself, as the only bucket of a part."""
        return (self,)


@dataclass(frozen=True, slots=True)
class Fragment:
    """Several buckets of one dtype that make one exchange, in their order; ``index`` counts fragments."""

    index: int
    buckets: tuple[Bucket, ...]


Part: TypeAlias = Bucket | Fragment
"""What a transfer moves."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One exchange as data: what starts now, at the end of which step its result is due, and how it merges."""

    part: Part
    due_step: int
    merge: Merge


@dataclass(frozen=True, slots=True)
class SharedStats:
    """What all replicas know alike after a step: carried by its exchange, or from one decider."""

    step: int
    loss: float
    """Weighted mean over all replicas."""
    weight: float
    sums: Mapping[str, float] = field(default_factory=dict)
    """Sums over all ranks of the numbers that extensions add to the metadata, by name."""
    elapsed_s: float | None = None
    """What the run has taken so far on the decider's clock, where a schedule asked for it."""
    step_s: float | None = None
    """What a step of the decider takes without its waits for exchanges, where a schedule asked for it."""
    exchange_s: float | None = None
    """What an exchange of the decider takes from its start to its end, where a schedule asked for it."""
    learning_rate: float | None = None
    """Of the optimizer, at the step that merges; alike on all in runs of ``farflung train``."""


class Schedule:
    """Says which transfers start at a step and when they are due; it is data, equal on all ranks.

    A member derives from it and gives ``merges`` and :meth:`plan`; the rest fits one that adapts to nothing and
    waits for each result at the step at which its exchange starts.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # at run time a field of a dataclass would take it for its default

        @property
        def merges(self) -> tuple[Merge, ...]:
            """Every merge that transfers may name."""

    @property
    def attach_refusal(self) -> str | None:
        """Reason why :func:`farflung.attach` cannot follow the schedule; None if it can."""
        return None

    @property
    def moves_gradients(self) -> bool:
        """Returns True if all merges move gradients: the optimizer steps on means alone, and ranks never differ."""
        return all(merge.moves == "gradient" for merge in self.merges)

    @property
    def is_synchronous(self) -> bool:
        """Returns True if the optimizer steps on means of gradients alone, each at the step of the gradients."""
        return self.moves_gradients and not self.late

    @property
    def has_late_gradients(self) -> bool:
        """Returns True if gradients leave in their backward pass and may be due at a later step."""
        return self.late and any(merge.moves == "gradient" for merge in self.merges)

    @property
    def late(self) -> bool:
        """Whether any result may be due at a later step than the one at which its exchange starts."""
        return False

    @property
    def reach(self) -> int:
        """The most steps that a replica begins after the last one whose exchanges are all there.

        0: where replicas are lost, the schedule does not go on without them.
        """
        return 0

    def check(self, size: int) -> None:
        """Refuses a number of replicas before a run begins.

        Raises:
          ConfigError: says why, and what to do instead.
        """

    def extensions(self, loop: Any) -> Sequence[Any]:
        """Returns what the schedule adds to a run; see :meth:`farflung.types.Sampler.extensions`.

        Raises:
          ConfigError: the run cannot have that.
        """
        del loop
        return ()

    def parts(self, buckets: Sequence[Bucket]) -> Sequence[Part]:
        """What its transfers move of a model with these buckets."""
        return buckets

    def init(self) -> State:
        """Its state before the first step."""
        return {}

    def plan(self, state: State, parts: Sequence[Part], step: int) -> list[Transfer]:
        """The transfers that start at ``step``, in the order of ``parts``; each part at most once."""
        raise NotImplementedError

    def asks(self, state: State, step: int) -> bool:
        """Whether the decider's times are wanted with the stats of the exchanges that start at ``step``."""
        del state, step
        return False

    def observe(self, state: State, stats: SharedStats) -> State:
        """Adapts to what was measured; equal on all ranks because ``stats`` is."""
        del stats
        return state


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
