"""Interfaces of codecs and reducers, which exchange gradients."""

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
    "ReduceResult",
    "Reducer",
    "Seeds",
    "StateSlot",
]


class Seeds(NamedTuple):
    """Seeds of a part's randomness: ``shared`` is equal on all replicas, ``local`` differs on each."""

    shared: int
    local: int


@dataclass(frozen=True, slots=True)
class CodecState:
    """State passed in and out of a codec or reducer, never kept inside it.

    ``shared`` is equal on all ranks, sent to joiners and compared by hash. ``local`` stays on its rank, such as
    residuals; a joiner starts with the ``local`` state of ``init``.
    """

    shared: State = field(default_factory=dict)
    local: State = field(default_factory=dict)


class Codec(Protocol):
    """Conversion of a gradient to a payload and back. Hyperparameters are frozen, and state is passed in and out.

    ``count`` is the number of replicas whose tensors are summed in the encoded tensor: 1 for a replica's own gradient.
    """

    @property
    def is_unbiased(self) -> bool:
        """Returns True if the expectation of ``decode(encode(g))`` is ``g``."""
        ...

    @property
    def is_stateless(self) -> bool:
        """Returns True if :meth:`init` gives an empty state that :meth:`encode` never fills."""
        ...

    @property
    def can_requantize(self) -> bool:
        """Returns True if partial sums may be encoded again on every hop of a collective. Such a codec is stateless,
        and its error is small relative to each number. Top-k is stateless but does not qualify.
        """
        ...

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns the initial state for one flat tensor."""
        ...

    def encode(self, state: CodecState, grad: Tensor, *, step: int, count: int) -> tuple[Payload, CodecState]:
        """Encodes ``grad``, which is not modified."""
        ...

    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        """Returns a dense tensor of ``spec``."""
        ...

    def update_state(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        """Updates the state from the average of the encoded tensors, which is equal on all replicas."""
        ...

    def is_linear(self, state: CodecState) -> bool:
        """Returns True if payloads may be summed part by part before decoding; may depend on the state."""
        ...


@dataclass(frozen=True, slots=True)
class Contribution:
    """Input of one replica to one exchange.

    Args:
      tensor: Flat tensor, given away: the reducer may write in it and return it as the mean.
      weight: Weight of this replica in the mean; 1 for a full batch.
      metadata: Float64 vector of losses, flags and other numbers, summed over the ranks in rank order.
    """

    tensor: Tensor
    weight: float
    metadata: Tensor


@dataclass(slots=True)
class StateSlot:
    """Holder of one bucket's reducer state between exchanges."""

    state: CodecState


@dataclass(frozen=True, slots=True)
class ReduceResult:
    """Result of an exchange.

    Args:
      mean: Weighted mean; may share memory with the contribution.
      weight: Sum of the weights.
      metadata: Metadata summed over all ranks.
      update_state: Function that updates the state when the result is merged; ``None`` if it stays.
      update_all_states: Function that updates the states of all units, by number, from the whole gradient. Runs after
        the last exchange of the step is merged and each state updated; ``None`` if they stay.
      shared_delta: Changes by :attr:`update_state` in the shared half of the state, for a replica that was sent the
        result.
    """

    mean: Tensor
    weight: float
    metadata: Tensor
    update_state: Callable[[CodecState], CodecState] | None = None
    update_all_states: Callable[[Mapping[int, CodecState]], Mapping[int, CodecState]] | None = None
    shared_delta: State = field(default_factory=dict)


class Reducer:
    """Exchange of one bucket over the network, possibly in several rounds; results are equal on all ranks.

    Implementations override :meth:`init` and :meth:`reduce`. Exchanges of one bucket may overlap, so the state changes
    only at two moments that are equal on all ranks: up to the first ``await`` (effects of encoding, such as a
    residual), and when the result is merged (:attr:`ReduceResult.update_state`).
    """

    __slots__ = ()
    is_repeatable: ClassVar[bool] = False
    """True if an exchange may be repeated among fewer replicas from the state before it."""
    has_shared_delta: ClassVar[bool] = False
    """True if results change the shared half of the state (:attr:`ReduceResult.shared_delta`). Only exchanges merged
    before the next ones start may then be repeated, since a replica that is ahead has another state.
    """

    @property
    def compresses_matrices(self) -> bool:
        """Returns True if bytes depend on the shapes of the parameters, and so on how they are sharded."""
        return False

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """Returns the initial state for one flat tensor."""
        raise NotImplementedError

    async def reduce(
        self, channel: Channel, slot: StateSlot, contribution: Contribution, *, step: int
    ) -> ReduceResult:
        """Returns the weighted mean over all replicas of ``channel``."""
        raise NotImplementedError

    def list_summed_nbytes(self, spec: TensorSpec, size: int) -> Sequence[int]:
        """Returns the bytes of each tensor that the collective sums in a step, without sums that use a codec.

        They resolve the collective ``auto`` when a run is created. Tensors of other sizes, such as those of a warm-up,
        are summed by the default collective with bit-identical results. By default, the tensor is summed as it is.

        Args:
          spec: Spec of the exchanged tensor.
          size: Number of replicas.
        """
        del size
        return (spec.nbytes,)

    def check(self, specs: Sequence[TensorSpec], steps: int | None = None) -> None:
        """Validates a model and run before the first step.

        Args:
          specs: Specs of all tensors to exchange.
          steps: Number of steps of the run, if known.

        Raises:
          ConfigError: the reducer cannot work; the message has an alternative.
        """

    def with_run_length(self, steps: int, rate_warmup_steps: int) -> Reducer:
        """Returns the reducer with its options resolved for a run of ``steps`` steps.

        Args:
          steps: Number of steps of the run.
          rate_warmup_steps: Number of first steps in which the learning rate rises.
        """
        del steps, rate_warmup_steps
        return self

    @property
    def warmup_steps(self) -> int:
        """Number of first steps whose exchanges differ from those of later steps, in a run of known length."""
        return 0

    def scale_warmup(self, share: float) -> Reducer:
        """Returns the reducer of a run that is ``share`` times as long, with a warm-up as much shorter."""
        del share
        return self

    def compute_num_exchanges(self, repeats: int) -> int:
        """Returns the number of exchanges in which each kind occurs ``repeats`` times, without warm-up."""
        return repeats

    def report(self, shared_states: Sequence[State]) -> Mapping[str, Json]:
        """Returns figures by name for the run's summary.

        Args:
          shared_states: Shared halves of the states of all units that it exchanges.
        """
        del shared_states
        return {}
