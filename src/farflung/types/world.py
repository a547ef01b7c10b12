"""The world: messages, clock, compute, decisions."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeVar

from farflung.tasks import Pending
from farflung.types.tensors import Counts, Json, Payload, Segment, Sent, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

    from farflung.types.sampling import Sampler

__all__ = [
    "AllReduce",
    "Change",
    "Channel",
    "CodingCost",
    "CodingLane",
    "Communicator",
    "Cost",
    "Decision",
    "Decisions",
    "Elastic",
    "Group",
    "Runtime",
    "SegmentCoding",
    "Tag",
]

T = TypeVar("T")


class Tag(NamedTuple):
    """Names a message inside one membership view; sends and receives match by source and tag, never by order."""

    exchange: int
    part: int = 0
    hop: int = 0


class SegmentCoding(Protocol):
    """How a collective encodes segments of one flat tensor anew on every hop."""

    @property
    def method(self) -> str:
        """What the costs of its encodings are called by; see :class:`CodingCost`."""
        ...

    def encode(self, tensor: Tensor, where: Segment, count: int) -> Payload:
        """The segment ``tensor``, which sums ``count`` ranks' and is left untouched."""
        ...

    def decode(self, payload: Payload, spec: TensorSpec, where: Segment, count: int) -> Tensor:
        """The dense segment again, the same bits on all ranks."""
        ...


class AllReduce(Protocol):
    """Sums a flat tensor and a side vector over all ranks of a channel; see :class:`farflung.comm.Collective`."""

    def __call__(
        self, channel: Channel, tensor: Tensor, side: Tensor, *, coding: SegmentCoding | None = None
    ) -> Awaitable[tuple[Tensor, Tensor]]:
        """The sums, bit-identical on all ranks.

        Args:
          channel: the exchange's; hops are reserved when the result is first awaited.
          tensor: flat; given away, and may be overwritten by the sum.
          side: a few float64 numbers, summed beside it in rank order.
          coding: how segments are encoded on their way; ``None``: not at all.
        """
        ...


class CodingCost(NamedTuple):
    """What a piece of an exchange's own arithmetic is, so that virtual time can charge for it.

    Args:
      operation: what is done, for example ``"encode"``, ``"decode"``, ``"add"`` or ``"learn"``.
      method: by what: the codec or reducer as recipes write it; empty for plain additions.
      numel: elements of the dense tensor that it is done to.
    """

    operation: str
    method: str
    numel: int


class CodingLane(Protocol):
    """The processor of a modelled device that carries the arithmetic of exchanges, one piece after the other.

    On the wall clock this is the communication thread.
    """

    def charge(self, cost: CodingCost) -> None:
        """Takes a piece on, behind all that was asked for before."""
        ...

    def through(self) -> Pending[None]:
        """Done when all that was asked for so far is."""
        ...


class Group(Protocol):
    """Ranks that exchange, as collectives see them: messages between two, and sums over all; a call returns at once."""

    auto: Mapping[int, str]
    """The collective that ``auto`` stands for by the bytes of a tensor, equal on all ranks; for others a rule by their
    size.
    Settled when a run is made.
    """
    sent: Sent
    """What this replica has sent, counted from tensors by :meth:`send`; what is sent past it counts by
    :meth:`Channel.count`."""

    @property
    def lane(self) -> CodingLane | None:
        """What the arithmetic of exchanges is charged to; ``None`` where it takes the time that it takes, or none."""
        ...

    @property
    def rank(self) -> int:
        """This replica."""
        ...

    @property
    def size(self) -> int:
        """Number of replicas."""
        ...

    def send(self, payload: Payload, dst: int, tag: Tag, priority: int = 0) -> Pending[None]:
        """Done when the message has left this process.

        Args:
          payload: given away: its tensors must not be modified until all receivers have provably read them.
          dst: the rank that receives it.
          tag: of the message.
          priority: of those to one receiver the smallest leaves first, and equal ones in their order; below 0 it waits
            behind no message of 0 or more, however much of that is under way.
        """
        ...

    def recv(
        self,
        src: int,
        tag: Tag,
        expect: tuple[TensorSpec, ...] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Pending[Payload]:
        """The message with this tag from ``src``; its tensors are read-only.

        Args:
          src: the rank that sends it.
          tag: of the message.
          expect: what its tensors are; any up to the communicator's bound when not given. Others fail the wait with
            :class:`farflung.errors.ProtocolError`.
          deadline_s: for how long to wait, in seconds; then this wait fails, with
            :class:`farflung.errors.DeadlinePassed`, and nothing else. ``math.inf``: for ever. ``None``: as long as the
            run's deadline says, which ends the view.
        """
        ...

    def land(self, src: int, tag: Tag, into: Tensor) -> None:
        """Names memory in which the first tensor of a message to come may arrive, so that it need not be copied.

        It does where ``into`` is contiguous and of its size, and nothing of it has come before. Bytes may be put there
        before the message is received, and where it never is.

        Args:
          src: the rank that sends it.
          tag: of the message.
          into: the memory.
        """
        ...

    def collective(self, name: str) -> AllReduce:
        """Returns the collective with a name."""
        ...

    def all_reduce(self, tensor: Tensor, tag: Tag) -> Pending[Tensor]:
        """The sum by the backend's own collective, where there is one."""
        ...


class Communicator(Group, Protocol):
    """The group of one membership view, and how its members come, go and are connected again."""

    def recv_any(
        self, tag: Tag, expect: tuple[TensorSpec, ...] | None = None, *, deadline_s: float | None = None
    ) -> Pending[tuple[int, Payload]]:
        """The first message with this tag from any rank, and its sender; see :meth:`recv`."""
        ...

    def forget(self, exchange: int) -> None:
        """Ends waits for messages of an exchange with :class:`farflung.errors.WaitEnded`, and drops these messages.

        Args:
          exchange: its number, as in :class:`Tag`.
        """
        ...

    def advance(self, view: int) -> None:
        """From now on this member sends and receives messages of a newer view.

        Waits of the older end with :class:`farflung.errors.WaitEnded`, what it has sent and has not left yet is
        withdrawn, and what comes of it is dropped. What members that were earlier here have sent of the newer one has
        been kept.

        Args:
          view: its number, above that of the older one; the first is 0.
        """
        ...

    def departure(self) -> Pending[int]:
        """The rank of the next member that leaves or is lost, each told once; one wait at a time.

        In a view that ends with its first loss that ends this wait too.
        """
        ...

    def arrival(self) -> Pending[int]:
        """The rank of the next member that comes in after the first meeting, each told once; one wait at a time."""
        ...

    def reconnect(self, rank: int, relay: int | None = None) -> Pending[None]:
        """Connects to a lost member again, or ends its connection first; both ends have to call it.

        Args:
          rank: the member.
          relay: a member that passes the messages of the two on, see :meth:`relay`; ``None``: the route is as it was at
            first.

        Returns:
          Done once the other end has connected too, as :meth:`arrival` tells; fails with
          :class:`farflung.errors.PeerLost` where its process has ended. What was under way over the old connection is
          lost.
        """
        ...

    def moved_nbytes(self, rank: int | None = None) -> int:
        """The bytes of large messages, whole and in part, that have come from and gone to a member, or to all."""
        ...

    def relay(self, one: int, other: int) -> None:
        """Passes the messages of two other members on that reconnect through this one."""
        ...

    def quiet_s(self, rank: int) -> float:
        """The seconds since bytes of a member have arrived; infinite where that is not known."""
        ...


@dataclass(frozen=True, slots=True)
class Cost:
    """What a computation is, so that virtual time can charge for it.

    Args:
      kind: of work.
      samples: how many it goes through.
      numels: of a backward pass, the parameters in each bucket; says when in the pass each is ready. Empty: at even
        steps.
    """

    kind: Literal["forward", "backward", "optimizer", "evaluate", "score", "other"]
    samples: int
    numels: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """A choice that was not a function of the seed, recorded with its step.

    Args:
      name: of what was decided; with ``step`` and ``rank`` it names the decision, so each is made once.
      step: the step it belongs to.
      value: what was decided.
      timing: whether it depended on time or arrival, so that another network might have led to another; a person's
        wish to stop does not.
      rank: the replica that decided for itself alone; ``None``: rank 0 decided for all.
    """

    name: str
    step: int
    value: Json
    timing: bool = True
    rank: int | None = None


class Decisions(Protocol):
    """The decisions of a run: those that are made now, and those of an earlier run that are made again."""

    def replayed(self, name: str, step: int, rank: int | None = None) -> Decision | None:
        """What the run that is replayed decided; ``None`` where it decided nothing, or none is replayed."""
        ...

    def first_replayed(self, name: str, step: int) -> int | None:
        """The first step from ``step`` on of such a decision for all replicas; ``None``: there is none."""
        ...

    def record(self, decision: Decision) -> None:
        """Keeps one; called on the rank that decided, rank 0 where it decided for all."""
        ...


class Channel(Protocol):
    """One exchange's share of a communicator: hops instead of tags, and its own count of bytes.

    All replicas run the same code inside one exchange, so each numbers its hops alike.
    """

    @property
    def rank(self) -> int:
        """This replica."""
        ...

    @property
    def size(self) -> int:
        """Number of replicas."""
        ...

    @property
    def auto(self) -> Mapping[int, str]:
        """See :attr:`Communicator.auto`."""
        ...

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes sent so far, counted from tensors."""
        ...

    def count(self, nbytes: Counts) -> None:
        """Counts what is sent past :meth:`send`: so many bytes to each rank.

        Args:
          nbytes: by rank.
        """
        ...

    def hops(self, count: int) -> int:
        """Reserves ``count`` consecutive hops for one collective or round; returns the first."""
        ...

    def compute(self, cost: CodingCost, fn: Callable[[], T]) -> T:
        """Runs ``fn`` now, on the wall and in virtual time, which charges the modelled seconds.

        What is sent afterwards leaves when the seconds charged so far are over. The end of an exchange awaits
        :meth:`computed`.
        """
        ...

    def computed(self) -> Pending[None]:
        """Done when the modelled device is through with what was computed so far."""
        ...

    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]:
        """See :meth:`Communicator.send`; leaves once the device is through with what was computed before."""
        ...

    def recv(self, src: int, hop: int, expect: tuple[TensorSpec, ...] | None = None) -> Pending[Payload]:
        """See :meth:`Communicator.recv`."""
        ...

    def land(self, src: int, hop: int, into: Tensor) -> None:
        """See :meth:`Communicator.land`."""
        ...

    def tag(self, hop: int) -> Tag:
        """What names the messages of a hop to the communicator."""
        ...

    def collective(self, name: str) -> AllReduce:
        """See :meth:`Communicator.collective`."""
        ...

    def all_reduce(self, tensor: Tensor) -> Pending[Tensor]:
        """See :meth:`Communicator.all_reduce`."""
        ...


class Change(NamedTuple):
    """A change of the members of a run that take samples.

    Args:
      step: the first step of the new members; no member has begun it when the change is agreed.
      ranks: the new members, by seniority; a replica keeps its rank.
      lost: the ranks that are left out.
      joined: the ranks that begin with :attr:`step`.
      again: the steps before :attr:`step` whose batches of lost members are in no update, or in a part of one.
      t: when it was agreed, in seconds on the run's clock.
      view: the number of the view.
    """

    step: int
    ranks: tuple[int, ...]
    lost: tuple[int, ...] = ()
    joined: tuple[int, ...] = ()
    again: range = range(0)
    t: float = 0.0
    view: int = 1


class Elastic(Protocol):
    """What a run is asked that goes on where replicas are lost; see :class:`farflung.membership.Elastic`."""

    @property
    def changes(self) -> list[Change]:
        """The members that take samples, by the step from which on they do."""
        ...

    @property
    def given_nbytes(self) -> int:
        """Bytes of the state, and of results, that this replica was given before it began."""
        ...

    @property
    def interrupted(self) -> Pending[None]:
        """Fails once this replica has left, the run has ended here, or it goes on without this replica.

        Another one then stands for the next membership.
        """
        ...

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the newest view, by seniority."""
        ...

    @property
    def view_number(self) -> int:
        """The number of the newest view."""
        ...

    async def probe(self) -> None:
        """Leaves out the members of the newest view that give no sign of life for a whole deadline."""
        ...

    def at(self, step: int) -> Change:
        """The change that is in force at a step."""
        ...

    def counted(self, step: int) -> int:
        """The number of batches that a step adds to those that are taken, less those given back at it."""
        ...

    def give_back(self, step: int, sampler: Sampler) -> None:
        """Returns the batches of lost members to a sampler, where a change takes effect at a step."""
        ...

    def start(
        self,
        number: int,
        part: int,
        make: Callable[..., Coroutine[Pending[Any], None, Any]],
        values: Any,
        *,
        rewind: Callable[[], None] | None,
        ends_step: bool,
    ) -> Any:
        """Starts an exchange; see :func:`farflung.comm.start`."""
        ...

    def end(self) -> None:
        """Tells the others that this replica's process ends on an error."""
        ...

    def leave(self) -> Pending[None]:
        """Leaves the run, which goes on without this replica; completed when it has left."""
        ...

    async def finish(self, steps: int) -> None:
        """Waits until all members have every result of the run, after so many steps."""
        ...

    @property
    def joins(self) -> bool:
        """Whether this replica has yet to be given the state of the run."""
        ...

    def begin_step(self, step: int) -> bool:
        """Notes that a step begins; returns True if a snapshot of the state before it is to be offered."""
        ...

    async def offer(self, step: int, parts: Sequence[Tensor]) -> None:
        """Offers a snapshot of the state before a step to replicas that join."""
        ...

    async def given(self) -> list[Tensor]:
        """Waits for a snapshot of the state of the run, and returns its parts."""
        ...

    async def follows(self, step: int) -> bool:
        """Waits until a replica that joins can follow a step; returns False where it begins at it."""
        ...


class Runtime(Protocol):
    """The one seam between the code and the world: clock, compute, messages, decisions."""

    elastic: Elastic | None
    """Makes exchanges again where replicas are lost; ``None``: the first loss ends the run."""
    events: int
    """Counts steps and computations, by which others see that a replica which they wait for is busy."""

    def address_of(self, rank: int) -> str | None:
        """How a replica that has come is reached, for others to let it in; ``None`` where the world knows."""
        ...

    @property
    def off_clock(self) -> Runtime | None:
        """The world with its clock at rest, for what is no part of training, such as evaluations and checkpoints.

        Computing and messages take no time there, and what is launched begins at once. ``None`` where everything takes
        the time that it takes.
        """
        ...

    @property
    def comm(self) -> Communicator:
        """The membership view's communicator."""
        ...

    @property
    def decisions(self) -> Decisions:
        """The run's."""
        ...

    def now(self) -> float:
        """Seconds since the run began, wall or virtual."""
        ...

    def sleep_until(self, t: float) -> Pending[None]:
        """Done when the clock shows ``t``."""
        ...

    def first_of(self, *pendings: Pending[Any]) -> Pending[int]:
        """The index of whichever completes first."""
        ...

    def wait_for_data(self, ready: Pending[None] | float) -> Pending[None]:
        """Done at a time, or when another thread says that samples are there; counts against no deadline.

        In virtual time a stream tells times. What another thread completes has no time there: the clock stands still
        until it is done.
        """
        ...

    def compute(self, cost: Cost, fn: Callable[[], T]) -> Pending[T]:
        """Runs ``fn``; virtual time charges the modelled seconds."""
        ...

    def backward(
        self, cost: Cost, fn: Callable[[Callable[[int], None]], None], on_ready: Callable[[int], None]
    ) -> Pending[None]:
        """Runs ``fn(ready)``, which calls ``ready(i)`` as bucket ``i`` fills; ``on_ready(i)`` follows at the
        time the bucket is ready in this world. Done when all of backward is.
        """
        ...

    def launch(self, exchange: Coroutine[Pending[Any], None, T]) -> Pending[T]:
        """Starts an exchange beside the replica; its end is the result."""
        ...

    def decide(self, name: str, step: int, local: Callable[[], Json]) -> Pending[Decision]:
        """A choice that depends on time or arrival: ``local`` is asked on one decider, all get its value."""
        ...

    def decide_own(self, name: str, step: int, local: Callable[[], Json]) -> Decision:
        """A choice by time or arrival that concerns this replica alone; made without a message."""
        ...
