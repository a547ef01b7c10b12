"""Schedules, transfers as data; and what updates parameters: optimizers, and learning rates that change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from farflung.types.tensors import State, TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = [
    "Bucket",
    "Fragment",
    "Merge",
    "OptimizerFactory",
    "Outer",
    "Part",
    "Pull",
    "RateScaling",
    "RateSchedule",
    "Replace",
    "Schedule",
    "SharedStats",
    "Swap",
    "Transfer",
]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat run of gradients of one dtype, in backward order; ``index`` 0 is ready first."""

    index: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Fragment:
    """Several buckets of one dtype that make one exchange, in their order; ``index`` counts fragments."""

    index: int
    buckets: tuple[Bucket, ...]


Part: TypeAlias = Bucket | Fragment
"""What a transfer moves."""


Moved: TypeAlias = Literal["gradient", "update", "parameters"]
"""What an exchange averages. Gradients leave as backward fills their buckets and are merged before the optimizer;
updates and parameters leave, and are merged, after it.
"""


class Merge(Protocol):
    """How a result that is due takes effect: settings alone, a frozen dataclass with JSON values.

    What carries it out in a replica is found by its type in :data:`farflung.replica.merges.MERGERS`.
    """

    moves: ClassVar[Moved]
    """What its exchanges average."""
    means: ClassVar[str]
    """What happens to a replica's own part, in words that follow it."""


@dataclass(frozen=True, slots=True)
class Replace:
    r"""The optimizer steps on the mean in place of the own gradient, and not at all where no mean is due.

    Args:
      correction: :math:`\lambda`; the mean :math:`\bar g`, taken at older parameters :math:`w'`, is applied as
        :math:`\bar g + \lambda\, \bar g \odot \bar g \odot (w - w')`.
      predict: whether gradients are taken where the own ones still under way would lead; ``None``: where the loop is
        farflung's own and the optimizer plain SGD.
    """

    moves: ClassVar[Moved] = "gradient"
    means: ClassVar[str] = "replaced by its mean"

    correction: float = 0.0
    predict: bool | None = False


@dataclass(frozen=True, slots=True)
class Swap:
    """Own updates were applied at their steps; when their mean arrives the two are exchanged."""

    moves: ClassVar[Moved] = "update"
    means: ClassVar[str] = "swapped for its mean"


@dataclass(frozen=True, slots=True)
class Pull:
    """Own updates were applied at their steps; their mean moves an anchor, and parameters are pulled towards that.

    Args:
      share: of the way to the anchor that is gone in a step, above 0 and at most 1; ``None``: by the optimizer's
        momentum and the delay, as :func:`farflung.replica.merges.share_of_a_step` says.
      period: steps between two exchanges of a part.
    """

    moves: ClassVar[Moved] = "update"
    means: ClassVar[str] = "pulled towards its mean"

    share: float | None = None
    period: int = 1


OptimizerState: TypeAlias = Literal["kept", "reset", "averaged"]
"""What becomes of what an optimizer has gathered for parameters that are merged."""


@dataclass(frozen=True, slots=True)
class Outer:
    """Own updates were applied at their steps; their mean is what an outer optimizer steps on.

    Args:
      rate: of the outer optimizer, which is SGD on the way that replicas went together.
      momentum: its momentum, at least 0 and below 1.
      nesterov: whether that is Nesterov's.
      mix: the share of the own parameters in those that follow, at least 0 and below 1.
      keep: whether own updates since the exchange began are added to what it has led to; without it they are lost, but
        for their share in ``mix``.
      state: what becomes of the own optimizer's state: it stays, begins afresh, or is averaged.
    """

    moves: ClassVar[Moved] = "update"
    means: ClassVar[str] = "replaced by an outer step on its mean"

    rate: float = 1.0
    momentum: float = 0.0
    nesterov: bool = False
    mix: float = 0.0
    keep: bool = False
    state: OptimizerState = "kept"


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
    """Over all replicas, what parts of theirs have added to the rider, by name."""
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
    needs_loss: ClassVar[str] = ""
    """What it needs the training loss for, which a training loop of the user's own does not tell; empty: nothing."""

    if TYPE_CHECKING:  # at run time a field of a dataclass would take it for its default

        @property
        def merges(self) -> tuple[Merge, ...]:
            """Every merge that transfers may name; whether a replica knows them is found out before the first step."""

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
