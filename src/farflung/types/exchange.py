"""Codecs and reducers: how a gradient travels."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, NamedTuple, Protocol

from farflung.types.tensors import Json, Payload, State, TensorSpec
from farflung.types.world import Channel

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "Codec",
    "CodecState",
    "Contribution",
    "Reduced",
    "Reducer",
    "Seeds",
    "StateSlot",
]


class Seeds(NamedTuple):
    """Where a part's randomness comes from: ``shared`` is equal on all replicas, ``own`` differs on each."""

    shared: int
    own: int


@dataclass(frozen=True, slots=True)
class CodecState:
    """State passed in and out of a codec or reducer, never kept inside it.

    ``shared`` is equal on all ranks: sent to a joiner, compared by hash. ``local`` stays with its owner
    (residuals); a joiner starts with what ``init`` gives.
    """

    shared: State = field(default_factory=dict)
    local: State = field(default_factory=dict)


class Codec(Protocol):
    """Gradient to payload and back. Hyperparameters are frozen; state is passed in and out.

    ``count`` is how many replicas' tensors are summed in what is encoded or decoded: 1 for one's own gradient.
    """

    @property
    def unbiased(self) -> bool:
        """Whether the expectation of ``decode(encode(g))`` is ``g``."""
        ...

    @property
    def stateless(self) -> bool:
        """Whether :meth:`init` gives an empty state that :meth:`encode` never fills."""
        ...

    @property
    def per_hop(self) -> bool:
        """Whether partial sums may be encoded anew on every hop of a collective: it is stateless, and what one
        encoding loses is small beside each number it keeps. Top-k is stateless, but not this.
        """
        ...

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """State for one flat tensor."""
        ...

    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Leaves ``grad`` untouched."""
        ...

    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        """A dense tensor of ``spec``."""
        ...

    def observe(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        """Learns from what was aggregated, equal on all replicas: the average of the tensors encoded."""
        ...

    def linear(self, state: CodecState) -> bool:
        """Whether payloads may be summed part by part before decoding; may depend on the state."""
        ...


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one replica gives to one exchange.

    Args:
      tensor: flat; given away: the reducer may write in it, and return it as the mean.
      weight: this replica's weight in the mean; 1 for a full batch.
      metadata: float64 vector summed over the ranks beside the tensor, in rank order: losses, flags, numbers.
    """

    tensor: Tensor
    weight: float
    metadata: Tensor


@dataclass(slots=True)
class StateSlot:
    """Holds the state of one bucket's reducer between exchanges."""

    state: CodecState


@dataclass(frozen=True, slots=True)
class Reduced:
    """What an exchange brings.

    Args:
      mean: the weighted mean; may share memory with what was contributed.
      weight: the sum of the weights.
      metadata: of all ranks, summed.
      learn: what the state becomes when the result is merged; ``None`` where it stays.
      learn_together: what the states of all parts, by number, become once the last exchange of its step is merged and
        each has learned for itself; ``None`` where they stay. For what is decided from the whole gradient.
      taught: what :attr:`learn` changes in the shared half of the state, for a replica that was given the result.
    """

    mean: Tensor
    weight: float
    metadata: Tensor
    learn: Callable[[CodecState], CodecState] | None = None
    learn_together: Callable[[Mapping[int, CodecState]], Mapping[int, CodecState]] | None = None
    taught: State = field(default_factory=dict)


class Reducer:
    """One bucket's whole path over the network, possibly several rounds; equal results on all ranks.

    A member derives from it and gives :meth:`init` and :meth:`reduce`. Exchanges of one bucket may overlap, so state
    changes at two moments that are alike on all ranks: up to the first ``await`` (what encoding leaves behind, such as
    a residual), and when the result is merged (:attr:`Reduced.learn`).
    """

    __slots__ = ()
    repeatable: ClassVar[bool] = False
    """Whether an exchange may be made again among fewer replicas, from the state before it."""
    teaches: ClassVar[bool] = False
    """Whether results change the shared half of the state (:attr:`Reduced.taught`). Then only exchanges that are merged
    before the next ones start may be made again, since the state before them is another on a replica that is ahead."""

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """State for one flat tensor."""
        raise NotImplementedError

    async def reduce(self, channel: Channel, slot: StateSlot, own: Contribution, *, step: int) -> Reduced:
        """The weighted mean over all replicas of ``channel``."""
        raise NotImplementedError

    def summed_nbytes(self, spec: TensorSpec, size: int) -> Sequence[int]:
        """Returns the bytes of each tensor that the collective sums in a step, but for sums with a codec inside.

        The collective ``auto`` is settled by them when a run is made. Tensors of other sizes, as those of a warm-up,
        are summed in the usual way, to the same bits. A reducer that does not say sums the tensor as it is.

        Args:
          spec: of the tensor that it carries.
          size: number of replicas.
        """
        del size
        return (spec.nbytes,)

    def check(self, specs: Sequence[TensorSpec], steps: int | None = None) -> None:
        """Refuses a model or run before it begins.

        Args:
          specs: of all that the reducer will carry.
          steps: of the run, where that is known.

        Raises:
          ConfigError: says why, and what to do instead.
        """

    def for_run(self, steps: int, warmup: int) -> Reducer:
        """Return the reducer with what hangs on a run's length settled.

        Args:
          steps: of the run.
          warmup: the first of them, in which the learning rate rises.
        """
        del steps, warmup
        return self

    def exchanges_until(self, times: int) -> int:
        """After so many exchanges each kind has happened ``times`` times, where replicas agree; without a warm-up."""
        return times

    def report(self, states: Sequence[State]) -> Mapping[str, Json]:
        """Figures by name, for the run's summary.

        Args:
          states: the shared halves of the states of all parts that it carries.
        """
        del states
        return {}
