"""Schedules: transfers as data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias

from farflung.types.tensors import State, TensorSpec

__all__ = [
    "Bucket",
    "Fragment",
    "Merge",
    "Outer",
    "Part",
    "Replace",
    "Schedule",
    "SharedStats",
    "Slice",
    "Swap",
    "Transfer",
]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A flat run of gradients of one dtype, in backward order; ``index`` 0 is ready first."""

    index: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Slice:
    """Elements ``start`` to ``stop`` of a bucket, so that urgent ones can overtake."""

    bucket: Bucket
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Fragment:
    """Several buckets that are exchanged together, less often."""

    index: int
    buckets: tuple[Bucket, ...]


Part: TypeAlias = Bucket | Slice | Fragment
"""What a transfer moves."""


@dataclass(frozen=True, slots=True)
class Replace:
    r"""Wait for the mean; it takes the place of the own part.

    Args:
      correction: :math:`\lambda`; the mean :math:`\bar g`, taken at older parameters :math:`w'`, is applied as
        :math:`\bar g + \lambda\, \bar g \odot \bar g \odot (w - w')`.
    """

    correction: float = 0.0


@dataclass(frozen=True, slots=True)
class Swap:
    """The own part was applied at its step; when the mean arrives the two are exchanged."""


@dataclass(frozen=True, slots=True)
class Outer:
    """The mean feeds an outer optimizer, whose result is mixed with the own parameters."""

    learning_rate: float
    momentum: float
    own_share: float = 0.0


Merge: TypeAlias = Replace | Swap | Outer
"""How a result that is due takes effect."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One exchange as data: what starts now, when its result is due, and how it merges."""

    part: Part
    what: Literal["gradient", "update", "parameters"]
    due_step: int
    due_at: Literal["optimizer", "forward"] = "optimizer"
    merge: Merge = Replace()


@dataclass(frozen=True, slots=True)
class SharedStats:
    """What all replicas know alike after a step: carried by its exchange, or from one decider."""

    step: int
    loss: float
    """Weighted mean over all replicas."""
    weight: float
    elapsed_s: float | None = None
    """The decider's clock, where a schedule asked for it."""
    step_s: float | None = None
    """What a step of the decider takes without its waits for exchanges, where a schedule asked for it."""
    exchange_s: float | None = None
    """What an exchange of the decider takes from its start to its end, where a schedule asked for it."""


class Schedule(Protocol):
    """Which transfers start at a step and when they are due. A schedule is data, equal on all ranks."""

    @property
    def steps_on(self) -> Literal["aggregate", "own"]:
        """What the optimizer steps on: the aggregate that is due (no step where none is), or the own gradient."""
        ...

    @property
    def what(self) -> Literal["gradient", "update", "parameters"]:
        """What its transfers move."""
        ...

    @property
    def clips(self) -> bool:
        """Whether the gradient that the optimizer steps on may be clipped."""
        ...

    @property
    def predicts(self) -> bool:
        """Whether gradients are taken where the own gradients still under way would lead."""
        ...

    def init(self, buckets: Sequence[Bucket]) -> State:
        """State for these buckets."""
        ...

    def plan(self, state: State, step: int) -> list[Transfer]:
        """The transfers that start at ``step``, in bucket order."""
        ...

    def asks(self, state: State, step: int) -> bool:
        """Whether the decider's times are wanted with the stats of the exchange that starts at ``step``."""
        ...

    def observe(self, state: State, stats: SharedStats) -> State:
        """Adapts to what was measured; equal on all ranks because ``stats`` is."""
        ...
