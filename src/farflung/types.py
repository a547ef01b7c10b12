"""The nouns and the protocols: what the parts of farflung say to each other.

Every protocol has its identity member elsewhere in the package (identity codec, synchronous schedule, uniform
sampler, in-memory stream, no sharing); together they equal plain data-parallel SGD. The protocols are structural:
a new member inherits from nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol, TypeAlias, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from farflung.tasks import Pending

__all__ = [
    "Arrivals",
    "Batch",
    "Bucket",
    "Channel",
    "Codec",
    "CodecState",
    "Communicator",
    "Contribution",
    "Cost",
    "Dataset",
    "Decision",
    "Draw",
    "Feature",
    "Fragment",
    "Json",
    "Merge",
    "Outer",
    "Part",
    "Payload",
    "PoolView",
    "Reduced",
    "Reducer",
    "Replace",
    "Runtime",
    "SampleIds",
    "Sampler",
    "Schedule",
    "Seeds",
    "SharedStats",
    "Sharing",
    "Slice",
    "State",
    "StateSlot",
    "Stream",
    "Swap",
    "Tag",
    "TensorSpec",
    "Transfer",
    "Work",
    "Workload",
]

T = TypeVar("T")

Json: TypeAlias = "None | bool | int | float | str | list[Json] | dict[str, Json]"
State: TypeAlias = "dict[str, Any]"
"""What a checkpoint keeps of a part: nested dicts with string keys; leaves are tensors or JSON values."""
SampleIds: TypeAlias = Tensor
"""Indices into a data set, shape ``(n,)``, int64."""


# --- tensors and payloads ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The shape and dtype of a dense tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @staticmethod
    def of(tensor: Tensor) -> TensorSpec:
        """The spec of ``tensor``."""
        return TensorSpec(tuple(tensor.shape), tensor.dtype)

    @property
    def numel(self) -> int:
        """Number of elements."""
        count = 1
        for dim in self.shape:
            count *= dim
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of the dense tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Payload:
    """What travels: an ordered tree of tensors. Codecs nest, so a part may be a payload itself.

    Whoever hands a payload to :meth:`Communicator.send` gives its tensors away: they are not written again until
    every receiver has provably read them.
    """

    parts: tuple[Tensor | Payload, ...]

    def tensors(self) -> Iterator[Tensor]:
        """The tensors, depth first."""
        for part in self.parts:
            if isinstance(part, Payload):
                yield from part.tensors()
            else:
                yield part

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, counted from the tensors themselves."""
        return sum(tensor.nbytes for tensor in self.tensors())


# --- data -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    """Some samples: ``inputs`` and ``targets`` share their first dimension."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)


class Dataset(Protocol):
    """Samples by index."""

    labels: Tensor | None
    """Class of each sample, shape ``(n,)``, int64, for partitioners; ``None`` where there are no classes."""

    def __len__(self) -> int: ...

    def take(self, ids: SampleIds, *, train: bool) -> Batch:
        """The samples ``ids``; with ``train``, random augmentation drawn from torch's current random state."""
        ...


class Workload(Protocol):
    """A task to train: model, per-sample loss, metric and data."""

    name: str
    defaults: Mapping[str, Json]
    """Settings that train it well when none are given: ``batch_size``, ``learning_rate``, ``momentum``,
    ``weight_decay``, ``steps``."""

    def model(self, generator: torch.Generator) -> nn.Module:
        """A fresh model whose initial weights depend on ``generator`` alone."""
        ...

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """One loss per sample, shape ``(len(batch),)``; the replica takes the weighted mean."""
        ...

    def metric(self, model: nn.Module, batch: Batch) -> Tensor:
        """One score per sample, higher is better, shape ``(len(batch),)``; accuracy is its mean."""
        ...

    def datasets(self) -> tuple[Dataset, Dataset]:
        """The training and the test set.

        Raises:
          DataError: absent, truncated or altered files, with the command that would fetch them.
        """
        ...


@dataclass(frozen=True, slots=True)
class Arrivals:
    """What a stream has let go: ids not handed out before, and when the wanted number will be there."""

    ids: SampleIds
    ready_at: float | None
    """Seconds on the runtime's clock; ``None``: the wanted number is there now."""


class Stream(Protocol):
    """Where a replica's samples come from, at what rate, and what becomes of those not yet used."""

    everything: bool
    """Whether all of the data set is there at any time, so that a sampler may pick anything in it."""

    def poll(self, now: float, wanted: int) -> Arrivals:
        """What has arrived since the last poll; never blocks."""
        ...

    def commit(self, ids: SampleIds, *, step: int) -> None:
        """These were used by a step that stands."""
        ...

    def state_dict(self) -> State:
        """The position to resume from."""
        ...

    def seek(self, state: State) -> None:
        """Goes back to a position from :meth:`state_dict`."""
        ...


@dataclass(frozen=True, slots=True)
class PoolView:
    """What a sampler may pick from at one step."""

    step: int
    rank: int
    size: int
    batch_size: int
    pool: int | SampleIds
    """The number of samples when all of them are at hand, else the ids that are."""


class Draw(NamedTuple):
    """A batch: which samples, and each one's importance weight; ``None`` where all weigh 1."""

    ids: SampleIds
    weights: Tensor | None


@dataclass(frozen=True, slots=True)
class Work:
    """Work that may fill a wait: ``run`` it, charge its ``cost``."""

    cost: Cost
    run: Callable[[], None]


class Sampler(Protocol):
    """Picks a batch and its importance weights; deterministic given state and seed."""

    def next(self, view: PoolView) -> Draw:
        """The batch of this replica for one step."""
        ...

    def meanwhile(self, model: nn.Module, budget_s: float) -> Work | None:
        """Work for a wait of about ``budget_s`` seconds, if there is any."""
        ...

    def state_dict(self) -> State:
        """Cursor, caches and scores, as of the last :meth:`next`."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Continues from a state; the number of replicas may differ from when it was saved."""
        ...


class Sharing(Protocol):
    """Moves samples between replicas."""

    data_leaves_device: bool

    async def exchange(self, channel: Channel, samples: Dataset) -> None:
        """One round; pausable at message boundaries."""
        ...


# --- codecs and reducers ----------------------------------------------------------------------------------------


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

    unbiased: bool
    """Whether the expectation of ``decode(encode(g))`` is ``g``."""
    stateless: bool
    """Whether :meth:`init` gives an empty state that :meth:`encode` never fills: such a codec may re-encode
    partial sums on every hop of a ring."""

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """State for one flat tensor."""
        ...

    def encode(
        self, state: CodecState, grad: Tensor, *, step: int, count: int
    ) -> tuple[Payload, CodecState]:
        """Leaves ``grad`` untouched."""
        ...

    def decode(
        self, state: CodecState, payload: Payload, spec: TensorSpec, *, step: int, count: int
    ) -> Tensor:
        """A dense tensor of ``spec``."""
        ...

    def observe(self, state: CodecState, aggregate: Tensor, *, step: int) -> CodecState:
        """Learns from what was aggregated, equal on all replicas."""
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
      rider: float64 vector summed over the replicas beside the tensor, in rank order: losses, votes, flags.
    """

    tensor: Tensor
    weight: float
    rider: Tensor


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
      rider: the sum of the riders.
      learn: what the state becomes when the result is merged; ``None`` where it stays.
    """

    mean: Tensor
    weight: float
    rider: Tensor
    learn: Callable[[CodecState], CodecState] | None = None


class Reducer(Protocol):
    """One bucket's whole journey over the network, possibly several rounds; equal results on all ranks.

    Exchanges of one bucket may overlap, so state changes at two moments that are alike on all ranks: up to the
    first ``await`` (what encoding leaves behind, such as a residual), and when the result is merged
    (:attr:`Reduced.learn`).
    """

    def init(self, spec: TensorSpec, seeds: Seeds) -> CodecState:
        """State for one flat tensor."""
        ...

    async def reduce(
        self, channel: Channel, slot: StateSlot, own: Contribution, *, step: int
    ) -> Reduced:
        """The weighted mean over all replicas of ``channel``."""
        ...


# --- schedules --------------------------------------------------------------------------------------------------


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


@dataclass(frozen=True, slots=True)
class Replace:
    """Wait for the mean; it takes the place of the own part."""


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


class Schedule(Protocol):
    """Which transfers start at a step and when they are due. A schedule is data, equal on all ranks."""

    steps_on: Literal["aggregate", "own"]
    """What the optimizer steps on: the aggregate that is due (no step where none is), or the own gradient."""

    def init(self, buckets: Sequence[Bucket]) -> State:
        """State for these buckets."""
        ...

    def plan(self, state: State, step: int) -> list[Transfer]:
        """The transfers that start at ``step``, in bucket order."""
        ...

    def observe(self, state: State, stats: SharedStats) -> State:
        """Adapts to what was measured; equal on all ranks because ``stats`` is."""
        ...


# --- the world --------------------------------------------------------------------------------------------------


class Tag(NamedTuple):
    """Names a message inside one membership view; sends and receives match by source and tag, never by order."""

    exchange: int
    part: int = 0
    hop: int = 0


Feature: TypeAlias = Literal["any_source", "native", "tags"]


class Communicator(Protocol):
    """Point-to-point messages and native collectives over one membership view; each call returns at once."""

    rank: int
    size: int
    features: frozenset[Feature]

    def send(self, payload: Payload, dst: int, tag: Tag) -> Pending[None]:
        """Done when the transport has taken the message over."""
        ...

    def recv(
        self, src: int | None, tag: Tag, expect: tuple[TensorSpec, ...] | None = None
    ) -> Pending[Payload]:
        """The message with this tag from ``src``; ``None``: from whoever is first.

        A message whose tensors are not as ``expect`` says fails the wait with :class:`ProtocolError`; without it
        any size up to the communicator's bound will do. The tensors received are read-only.
        """
        ...

    def all_reduce(self, tensor: Tensor, tag: Tag) -> Pending[Tensor]:
        """The sum by the backend's own collective. Feature ``native``."""
        ...


@dataclass(frozen=True, slots=True)
class Cost:
    """What a computation is, so that virtual time can charge for it."""

    kind: Literal["forward", "backward", "optimizer", "evaluate", "score", "other"]
    samples: int


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice that depended on time or arrival, made by one decider and recorded with its step."""

    name: str
    step: int
    value: Json


class Channel(Protocol):
    """One exchange's share of a communicator: hops instead of tags, and its own count of bytes.

    All replicas run the same code inside one exchange, so each numbers its hops alike.
    """

    rank: int
    size: int
    features: frozenset[Feature]
    sent_nbytes: int
    """Payload bytes sent so far, counted from tensors."""

    def hops(self, count: int) -> int:
        """Reserves ``count`` consecutive hops for one collective or round; returns the first."""
        ...

    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]:
        """See :meth:`Communicator.send`."""
        ...

    def recv(
        self, src: int | None, hop: int, expect: tuple[TensorSpec, ...] | None = None
    ) -> Pending[Payload]:
        """See :meth:`Communicator.recv`."""
        ...

    def all_reduce(self, tensor: Tensor) -> Pending[Tensor]:
        """See :meth:`Communicator.all_reduce`."""
        ...


@runtime_checkable
class Runtime(Protocol):
    """The one seam between the code and the world: clock, compute, messages, decisions."""

    comm: Communicator

    def now(self) -> float:
        """Seconds since the run began, wall or virtual."""
        ...

    def sleep_until(self, t: float) -> Pending[None]:
        """Done when the clock shows ``t``."""
        ...

    def first_of(self, *pendings: Pending[Any]) -> Pending[int]:
        """The index of whichever completes first."""
        ...

    def compute(self, cost: Cost, fn: Callable[[], T]) -> Pending[T]:
        """Runs ``fn``; virtual time charges the modelled seconds."""
        ...

    def backward(
        self, cost: Cost, fn: Callable[[Callable[[int], None]], None], on_ready: Callable[[int], None]
    ) -> Pending[None]:
        """Runs ``fn(ready)``, which calls ``ready(i)`` as bucket ``i`` fills; ``on_ready(i)`` follows at the
        time the bucket is ready in this world. Done when all of backward is."""
        ...

    def launch(self, exchange: Coroutine[Pending[Any], None, T]) -> Pending[T]:
        """Starts an exchange beside the replica; its end is the result."""
        ...

    def decide(self, name: str, step: int, local: Callable[[], Json]) -> Pending[Decision]:
        """A choice that depends on time or arrival: ``local`` is asked on one decider, all get its value."""
        ...
