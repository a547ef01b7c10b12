"""Interfaces of the runtime: messages, clock, computation and decisions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from typing_extensions import override

from farflung.tasks import Pending
from farflung.types.tensors import Counts, Json, Payload, Segment, SentBytes, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from farflung.types.sampling import Sampler

__all__ = [
    "AllReduce",
    "Change",
    "Channel",
    "CodingProcessor",
    "Communicator",
    "Cost",
    "Decision",
    "Decisions",
    "ElasticMembership",
    "Group",
    "Runtime",
    "SegmentCoding",
    "Tag",
]

T = TypeVar("T")


class Tag(NamedTuple):
    """Identifier of a message in one membership view; messages are matched by source and tag, never by order."""

    exchange: int
    part: int = 0
    hop: int = 0


class SegmentCoding(Protocol):
    """Encoding of segments of one flat tensor on every hop of a collective."""

    @property
    def method(self) -> str:
        """Name of the encoding for charges; see :meth:`Channel.charge`."""
        ...

    def encode(self, tensor: Tensor, segment: Segment, count: int) -> Payload:
        """Encodes the segment ``tensor``, a sum over ``count`` ranks, which is not modified."""
        ...

    def decode(self, payload: Payload, spec: TensorSpec, segment: Segment, count: int) -> Tensor:
        """Returns the dense segment, bit-identical on all ranks."""
        ...


class AllReduce(Protocol):
    """Sum of a flat tensor and its metadata over all ranks of a channel; see :class:`farflung.comm.Collective`."""

    def __call__(
        self, channel: Channel, tensor: Tensor, metadata: Tensor, *, coding: SegmentCoding | None = None
    ) -> Awaitable[tuple[Tensor, Tensor]]:
        """Returns the sums, bit-identical on all ranks.

        Args:
          channel: Channel of the exchange; hops are reserved when the result is first awaited.
          tensor: Flat tensor, given away: it may be overwritten by the sum.
          metadata: A few float64 numbers, summed in rank order.
          coding: Encoding of segments on their way; ``None`` for no encoding.
        """
        ...


class CodingProcessor(Protocol):
    """Processor of a modelled device that runs the arithmetic of exchanges in sequence.

    On the wall clock this is the communication thread.
    """

    def charge(self, operation: str, numel: int, method: str) -> None:
        """Queues an operation behind those charged before; see :meth:`Channel.charge`."""
        ...

    def wait_idle(self) -> Pending[None]:
        """Completes when all operations charged so far are done."""
        ...


class Group(Protocol):
    """Ranks that exchange, with messages between two and sums over all; calls return immediately."""

    sent_bytes: SentBytes
    """Bytes that this replica has sent. :meth:`send` counts tensors; bytes sent by other means are added by
    :meth:`Channel.count_sent`.
    """

    @property
    def coding_processor(self) -> CodingProcessor | None:
        """Processor charged with the arithmetic of exchanges; ``None`` if that is not modelled."""
        ...

    @property
    def rank(self) -> int:
        """Rank of this replica."""
        ...

    @property
    def size(self) -> int: ...

    def send(self, payload: Payload, dst: int, tag: Tag, priority: int = 0) -> Pending[None]:
        """Sends a message; completes when it has left this process.

        Args:
          payload: Tensors, given away: they must not be modified until all receivers have provably read them.
          dst: Receiving rank.
          tag: Tag of the message.
          priority: Messages to one receiver leave by ascending priority, and in order if equal. A more urgent message
            overtakes one that is partly sent if it is shorter than the remainder.
        """
        ...

    def recv(self, src: int, tag: Tag, expect: tuple[TensorSpec, ...] | None = None) -> Pending[Payload]:
        """Receives the message with this tag from ``src``; its tensors are read-only.

        Args:
          src: Sending rank.
          tag: Tag of the message.
          expect: Specs of its tensors; others fail the wait with :class:`farflung.errors.ProtocolError`. ``None``
            allows any up to the communicator's bound.
        """
        ...

    def post_recv_buffer(self, src: int, tag: Tag, buffer: Tensor) -> None:
        """Posts a buffer in which the first tensor of a message may arrive without a copy.

        It is used if it is contiguous and of the tensor's size, and nothing of the message has arrived. Bytes may be
        written to it before the message is received, even if it never is.

        Args:
          src: Sending rank.
          tag: Tag of the message.
          buffer: Buffer.
        """
        ...

    def get_collective(self, name: str) -> AllReduce:
        """Returns the collective with a name."""
        ...

    def all_reduce(self, tensor: Tensor, tag: Tag) -> Pending[Tensor]:
        """Sums a tensor over all ranks by the backend's native collective, if it has one."""
        ...


class Communicator(Group, Protocol):
    """Group of one membership view, with joins, leaves and reconnections of its members."""

    auto_collectives: Mapping[int, str]
    """Collective that ``auto`` stands for by the bytes of a tensor, equal on all ranks and resolved when a run is
    created. Tensors of other sizes use a rule by size.
    """

    @override
    def recv(
        self,
        src: int,
        tag: Tag,
        expect: tuple[TensorSpec, ...] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Pending[Payload]:
        """Receives as :meth:`Group.recv`.

        Args:
          src: Sending rank.
          tag: Tag of the message.
          expect: Specs of its tensors.
          deadline_s: Seconds until this wait alone fails with :class:`farflung.errors.DeadlinePassed`; ``math.inf``
            never fails. ``None`` uses the run's deadline, which ends the view.
        """
        ...

    def recv_any(
        self, tag: Tag, expect: tuple[TensorSpec, ...] | None = None, *, deadline_s: float | None = None
    ) -> Pending[tuple[int, Payload]]:
        """Receives the first message with this tag from any rank, and its sender; see :meth:`recv`."""
        ...

    def cancel_exchange(self, exchange: int) -> None:
        """Ends waits for messages of an exchange with :class:`farflung.errors.WaitEnded`, and drops these messages.

        Args:
          exchange: Number of the exchange, as in :class:`Tag`.
        """
        ...

    def advance_view(self, view: int) -> None:
        """Switches this member to a newer view.

        Waits of the older view end with :class:`farflung.errors.WaitEnded`. Its unsent messages are withdrawn, and
        arriving ones dropped. Messages of the newer view from members that switched earlier have been kept.

        Args:
          view: Number of the view, above that of the older one; the first is 0.
        """
        ...

    def wait_for_leave(self) -> Pending[int]:
        """Waits for the next member that leaves or is lost and returns its rank, each once; one wait at a time.

        In a view that ends with its first loss, this wait ends too.
        """
        ...

    def wait_for_join(self) -> Pending[int]:
        """Waits for the next member that joins after the start and returns its rank, each once; one wait at a time."""
        ...

    def reconnect(self, rank: int, relay: int | None = None) -> Pending[None]:
        """Reconnects to a lost member, or closes its connection first; both ends have to call it.

        Args:
          rank: Rank of the member.
          relay: Rank that forwards messages between the two, see :meth:`relay`; ``None`` for the initial route.

        Returns:
          Pending that completes once the other end has connected too, as :meth:`wait_for_join` reports. It fails with
          :class:`farflung.errors.PeerLost` if the process has ended. Messages in flight on the old connection are lost.
        """
        ...

    def get_traffic_nbytes(self, rank: int | None = None) -> int:
        """Returns the bytes of large messages, complete or partial, exchanged with a member or with all."""
        ...

    def relay(self, rank_a: int, rank_b: int) -> None:
        """Forwards messages between two other members that reconnect through this one."""
        ...

    def get_idle_s(self, rank: int) -> float:
        """Returns the seconds since bytes of a member last arrived; infinite if unknown."""
        ...


@dataclass(frozen=True, slots=True)
class Cost:
    """Computation for which virtual time charges.

    Args:
      kind: Kind of work.
      samples: Number of samples.
      numels: Number of parameters in each bucket of a backward pass, which determines when each is ready. If empty,
        buckets are ready at equal intervals.
      share: Part of the work for which time is charged.
    """

    kind: Literal["forward", "backward", "optimizer", "evaluate", "score", "other"]
    samples: int
    numels: tuple[int, ...] = ()
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Decision:
    """Choice that is not a function of the seed, recorded with its step.

    Args:
      name: Name of the decision; unique together with ``step`` and ``rank``.
      step: Step of the decision.
      value: Decided value.
      timing: True if it depends on time or arrival, so that another network may lead to another value; a person's
        request to stop does not.
      rank: Replica that decided for itself only; ``None`` if rank 0 decided for all.
    """

    name: str
    step: int
    value: Json
    timing: bool = True
    rank: int | None = None


class Decisions(Protocol):
    """Decisions of a run: new ones, and those replayed from an earlier run."""

    def find_replayed(self, name: str, step: int, rank: int | None = None) -> Decision | None:
        """Returns the replayed run's decision; ``None`` if it made none, or no run is replayed."""
        ...

    def find_replayed_step(self, name: str, step: int) -> int | None:
        """Returns the first step from ``step`` with such a decision for all replicas, or ``None``."""
        ...

    def record(self, decision: Decision) -> None:
        """Records a decision; called on the rank that decided, rank 0 if it decided for all."""
        ...


class Channel(Protocol):
    """Part of a communicator for one exchange, with hops in place of tags and its own byte count.

    All replicas run the same code in an exchange, so hops have equal numbers on each.
    """

    @property
    def rank(self) -> int:
        """Rank of this replica."""
        ...

    @property
    def size(self) -> int: ...

    @property
    def sent_nbytes(self) -> int: ...

    def count_sent(self, nbytes: Counts) -> None:
        """Adds bytes to each rank that are sent by other means than :meth:`send`.

        Args:
          nbytes: Number of bytes by rank.
        """
        ...

    def reserve_hops(self, count: int) -> int:
        """Reserves ``count`` consecutive hops for one phase of an exchange; returns the first.

        Messages of later phases are less urgent.
        """
        ...

    def charge(self, operation: str, numel: int, method: str = "") -> None:
        """Charges a modelled device for the arithmetic that follows; does nothing on the wall clock.

        Messages sent afterwards leave when the seconds charged so far have passed. The end of an exchange awaits
        :meth:`wait_computed`.

        Args:
          operation: Operation, for example ``"encode"``, ``"decode"``, ``"add"`` or ``"learn"``.
          numel: Number of elements of the dense tensor.
          method: Codec or reducer as written in recipes; empty for plain additions and copies.
        """
        ...

    def wait_computed(self) -> Pending[None]:
        """Completes when the modelled device has finished all computation so far."""
        ...

    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]:
        """Sends as :meth:`Communicator.send`, once the device has finished earlier computation."""
        ...

    def recv(self, src: int, hop: int, expect: tuple[TensorSpec, ...] | None = None) -> Pending[Payload]:
        """Receives as :meth:`Communicator.recv`."""
        ...

    def post_recv_buffer(self, src: int, hop: int, buffer: Tensor) -> None:
        """Posts a buffer as :meth:`Communicator.post_recv_buffer`."""
        ...

    def get_tag(self, hop: int) -> Tag:
        """Returns the communicator's tag for messages of a hop."""
        ...

    def get_collective(self, name: str) -> AllReduce:
        """Returns a collective as :meth:`Communicator.get_collective`."""
        ...

    def all_reduce(self, tensor: Tensor) -> Pending[Tensor]:
        """Sums a tensor as :meth:`Communicator.all_reduce`."""
        ...


class Change(NamedTuple):
    """Change of the members of a run that take samples.

    Args:
      step: First step of the new members; no member has begun it when the change is agreed.
      ranks: New members by seniority; a replica keeps its rank.
      lost_ranks: Ranks that are removed.
      joined_ranks: Ranks that begin with :attr:`step`.
      repeated_steps: Steps before :attr:`step` whose batches of lost members are in no update, or only partly.
      time_s: Time of the agreement in seconds on the run's clock.
      view: Number of the view.
    """

    step: int
    ranks: tuple[int, ...]
    lost_ranks: tuple[int, ...] = ()
    joined_ranks: tuple[int, ...] = ()
    repeated_steps: range = range(0)
    time_s: float = 0.0
    view: int = 1


class ElasticMembership(Protocol):
    """Interface of runs that continue when replicas are lost; see :class:`farflung.membership.PaxosMembership`."""

    @property
    def changes(self) -> list[Change]:
        """Members that take samples, by the step from which they do."""
        ...

    @property
    def join_nbytes(self) -> int:
        """Number of bytes of state and results that this replica received before it began."""
        ...

    @property
    def interruption(self) -> Pending[None]:
        """Pending that fails once this replica has left, or the run has ended or continues without it.

        It is replaced by another for the next membership.
        """
        ...

    @property
    def members(self) -> tuple[int, ...]:
        """Members of the newest view, by seniority."""
        ...

    @property
    def view_number(self) -> int: ...

    async def probe(self) -> None:
        """Removes members of the newest view that are silent for a whole deadline."""
        ...

    def find_change(self, step: int) -> Change:
        """Returns the change in force at a step."""
        ...

    def count_batches(self, step: int) -> int:
        """Returns the number of batches that a step takes, less those returned at it."""
        ...

    def return_batches(self, step: int, sampler: Sampler) -> None:
        """Puts batches of lost members back into a sampler, if a change takes effect at a step."""
        ...

    def start(
        self,
        number: int,
        part: int,
        make: Callable[..., Coroutine[Pending[Any], None, Any]],
        result_codec: Any,
        *,
        rewind: Callable[[], None] | None,
        is_last_of_step: bool,
    ) -> Any:
        """Starts an exchange; see :func:`farflung.comm.start_exchange`."""
        ...

    def announce_failure(self) -> None:
        """Announces to the others that this replica's process ends on an error."""
        ...

    def leave(self) -> Pending[None]:
        """Leaves the run, which continues without this replica; completes when it has left."""
        ...

    async def finish(self, steps: int) -> None:
        """Waits until all members have every result of a run of this number of steps."""
        ...

    @property
    def is_joining(self) -> bool:
        """Returns True if this replica has not received the state of the run yet."""
        ...

    def should_publish_state(self, step: int) -> bool:
        """Records that a step begins; returns True if a snapshot of the state before it should be published."""
        ...

    async def publish_state(self, step: int, parts: Sequence[Tensor]) -> None:
        """Publishes a snapshot of the state before a step to replicas that join."""
        ...

    async def receive_state(self) -> list[Tensor]:
        """Waits for a snapshot of the state of the run, and returns its parts."""
        ...

    async def should_follow(self, step: int) -> bool:
        """Waits until a joining replica can follow a step; returns False if it begins at it."""
        ...


class Runtime(Protocol):
    """Clock, computation, messages and decisions of one replica, on the wall clock or in virtual time."""

    elastic: ElasticMembership | None
    """Membership that repeats exchanges when replicas are lost; ``None`` if the first loss ends the run."""
    events: int
    """Number of steps and computations, which shows waiting peers that this replica is busy."""

    def get_address(self, rank: int) -> str | None:
        """Returns the address for others to admit a replica that has joined; ``None`` if the world knows it."""
        ...

    @property
    def untimed(self) -> Runtime | None:
        """Runtime with a stopped clock for work outside training, such as evaluations and checkpoints.

        Computation and messages take no time there, and launched exchanges begin immediately. ``None`` on the wall
        clock.
        """
        ...

    @property
    def comm(self) -> Communicator: ...

    @property
    def decisions(self) -> Decisions: ...

    def read_clock(self) -> float:
        """Returns the seconds since the run began, wall or virtual."""
        ...

    def sleep_until(self, t: float) -> Pending[None]:
        """Completes when the clock shows ``t``."""
        ...

    def wait_any(self, *pendings: Pending[Any]) -> Pending[int]:
        """Waits for the first to complete and returns its index."""
        ...

    def wait_for_data(self, ready: Pending[None] | float) -> Pending[None]:
        """Completes at a time, or when another thread reports samples; counts against no deadline.

        In virtual time a stream gives times. While another thread completes a pending, the virtual clock stands still.
        """
        ...

    def compute(self, cost: Cost, fn: Callable[[], T]) -> Pending[T]:
        """Runs ``fn``; virtual time charges the modelled seconds."""
        ...

    async def run_forward(
        self,
        cost: Cost,
        order: Sequence[int],
        fn: Callable[[Callable[[int], None]], T],
        prepare: Callable[[int], Coroutine[Pending[Any], None, None]],
    ) -> T:
        """Returns the result of ``fn(use)``, which calls ``use(i)`` before it first uses bucket ``i``.

        In this world's time, ``prepare(i)`` completes before the layers that need the bucket begin.

        Args:
          cost: Cost of the forward pass.
          order: Buckets in the order of their first use.
          fn: Function that runs the forward pass.
          prepare: Function that waits for a bucket and updates it.
        """
        ...

    def run_backward(
        self, cost: Cost, fn: Callable[[Callable[[int], None]], None], on_ready: Callable[[int], None]
    ) -> Pending[None]:
        """Runs ``fn(ready)``, which calls ``ready(i)`` as bucket ``i`` fills, and completes when it is done. In this
        world's time, ``on_ready(i)`` follows when the bucket is ready.
        """
        ...

    def launch(self, exchange: Coroutine[Pending[Any], None, T]) -> Pending[T]:
        """Starts an exchange concurrently with the replica; completes with its result."""
        ...

    def decide(self, name: str, step: int, local: Callable[[], Json]) -> Pending[Decision]:
        """Decides a choice by time or arrival: one decider calls ``local``, and all get its value."""
        ...

    def decide_locally(self, name: str, step: int, local: Callable[[], Json]) -> Decision:
        """Decides a choice by time or arrival for this replica only, without a message."""
        ...
