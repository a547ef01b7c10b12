"""Collectives computed as a whole: rows of messages instead of one after the other, with the same times and bits."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from torch import Tensor

from farflung.comm.channel import describe
from farflung.comm.collectives import COLLECTIVES, Collective, ring
from farflung.comm.collectives.segments import cut, sum_in_order
from farflung.errors import ProtocolError
from farflung.sim.clock import Clock
from farflung.sim.groups import ReduceShape
from farflung.sim.pairs import Pairs, Ranks, by_time
from farflung.tasks import Pending, failed
from farflung.types import Counts, Segment, Tag, TensorSpec

__all__ = ["ClosedForms", "InOne", "Members"]

FEW = 64
"""Up to so many ranks segments are added one by one; beyond, all of them together from a stack of the tensors."""


@dataclass(frozen=True, slots=True)
class InOne:
    """A rank's part in a collective that is computed as a whole.

    Args:
      result: the sums of tensor and side.
      sent: bytes that this rank sends to each.
      hops: how many the collective has.
    """

    result: Pending[tuple[Tensor, Tensor]]
    sent: Counts
    hops: int


class Members:
    """The ranks' tensors in a collective, and their waits for the sum.

    Args:
      size: the number of ranks.
      add: sums all tensors, in the collective's order.
    """

    def __init__(self, size: int, add: Callable[[list[Tensor]], Tensor] = sum_in_order) -> None:
        self.tensors: list[Tensor] = [torch.empty(0)] * size
        self.sides: list[Tensor] = [torch.empty(0)] * size
        self._add = add
        self._waits: dict[int, Pending[tuple[Tensor, Tensor]]] = {}
        self._sums: tuple[Tensor, Tensor] | None = None
        self.joined = 0
        """The number of ranks that have joined."""

    def join(self, rank: int, tensor: Tensor, side: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        self.tensors[rank], self.sides[rank] = tensor, side
        self._waits[rank] = Pending()
        self.joined += 1
        return self._waits[rank]

    def give(self, ranks: Iterable[int]) -> None:
        """Ends the collective for some ranks: writes the sum, computed once, into each rank's own tensor."""
        if self._sums is None:
            self._sums = self._add(self.tensors), sum_in_order(self.sides)
        total, total_side = self._sums
        for rank in ranks:
            waits = self._waits.pop(rank, None)
            if waits is not None:  # otherwise it has it already
                own = self.tensors[rank]
                own.copy_(total)
                waits.set((own, total_side.clone()))

    @property
    def waiting(self) -> bool:
        return bool(self._waits)

    def fail(self, error: BaseException) -> None:
        for pending in self._waits.values():
            pending.fail(error)


class _OwnersInOne:
    """Parts go to the owners of the shards, sums come back; ranks join when they like.

    On links that nothing shares, a message's arrival is known when it is sent. So a rank that joins sends a row of
    messages, an owner knows when it can add as soon as the last rank has joined, and sends its row at that time:
    hop by hop, but with two events for each time at which something happens instead of some for each message.
    """

    def __init__(
        self, clock: Clock, pairs: Pairs, size: int, owners: int, tensor: Tensor, side: Tensor
    ) -> None:
        self._clock, self._pairs, self._size = clock, pairs, size
        self._shape = ReduceShape(owners, size, tensor.numel(), tensor.element_size(), side.nbytes)
        self._owners = owners
        # By piece and owner.
        self._nbytes = np.array([self._shape.pieces_nbytes(owner) for owner in range(owners)]).T
        self._side_nbytes, self._back_nbytes = side.nbytes, self._shape.back_nbytes
        self._pieces = len(self._nbytes)
        self.hops = 2 * self._pieces
        self._members = Members(size)
        self._complete = np.zeros((self._pieces, owners))
        self._finish = np.zeros(size)
        self._to_spread = owners * self._pieces

    def sent(self, rank: int) -> Counts:
        """The bytes that a rank sends to each rank."""
        return self._shape.sent(rank)

    def enter(self, rank: int, tensor: Tensor, side: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        """Joins a rank, which sends its part of each shard to the owners."""
        now = self._clock.now()
        joined = self._members.join(rank, tensor, side)
        for piece in range(self._pieces):
            nbytes = self._nbytes[piece] + (self._side_nbytes if piece == 0 else 0)
            arrives = self._pairs.send_many(rank, slice(0, self._owners), nbytes)
            if rank < self._owners:
                arrives[rank] = now
            np.maximum(self._complete[piece], arrives, out=self._complete[piece])
        if self._members.joined == self._size:
            self._complete_by(rank)
        return joined

    def fail(self, error: BaseException) -> None:
        """Fails the waits of all ranks that have joined."""
        self._members.fail(error)

    def _complete_by(self, last: int) -> None:
        """Schedules the owners' sums, whose times are known once the ``last`` rank has joined."""
        np.maximum.accumulate(self._complete, axis=0, out=self._complete)  # an owner adds piece after piece
        for t, places in by_time(self._complete.T.reshape(-1)):
            # What it finds complete itself it sends before it does anything else.
            own = [place for place in places if place // self._pieces == last and t == self._clock.now()]
            others = [place for place in places if place not in own] if own else places
            if others:
                self._clock.at(t, partial(self._spread, others))
            if own:
                self._spread(own)

    def _spread(self, places: list[int]) -> None:
        """Sends owners' sums to all ranks.

        Args:
          places: for each sum, the owner times the number of pieces, plus the piece.
        """
        now = self._clock.now()
        for owner, piece in (divmod(place, self._pieces) for place in places):
            nbytes = self._nbytes[piece, owner] + (self._back_nbytes if piece == 0 else 0)
            arrives = self._pairs.send_many(owner, slice(0, self._size), nbytes)
            arrives[owner] = now
            np.maximum(self._finish, arrives, out=self._finish)
            self._to_spread -= 1
            if not self._to_spread:
                for t, ranks in by_time(self._finish):
                    self._clock.at(t, partial(self._members.give, ranks))


class _RingInOne:
    """Each rank sends to the next; ranks join when they like.

    A rank sends hop ``k + 1`` once it has sent hop ``k`` and has received its predecessor's. All messages that
    arrive at one time are one event, and what they set off is computed together.
    """

    def __init__(self, clock: Clock, pairs: Pairs, size: int, tensor: Tensor, side: Tensor) -> None:
        self._clock, self._pairs, self._size = clock, pairs, size
        self._segments = cut(tensor.numel(), size)
        self._nbytes = np.array([s.length for s in self._segments], dtype=np.int64) * tensor.element_size()
        self._nbytes[0] += side.nbytes  # the side vector rides with it
        self.hops = 2 * (size - 1)
        self._members = Members(size, lambda tensors: _ring_sum(tensors, self._segments))
        self._sent = np.zeros(size, dtype=np.int64)
        self._received = np.zeros(size, dtype=np.int64)
        self._arriving: dict[float, list[Ranks]] = {}

    def sent(self, rank: int) -> Counts:
        """Bytes to each rank: to the next each segment once in either half, but one."""
        after = (rank + 1) % self._size
        counts = np.zeros(self._size, dtype=np.int64)
        counts[after] = 2 * self._nbytes.sum() - self._nbytes[after] - self._nbytes[(rank + 2) % self._size]
        return counts

    def enter(self, rank: int, tensor: Tensor, side: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        """Joins a rank, which sends its own segment."""
        joined = self._members.join(rank, tensor, side)
        ranks = np.array([rank])
        self._send(ranks)
        self._go_on(ranks)
        return joined

    def fail(self, error: BaseException) -> None:
        """Fails the waits of all ranks that have joined."""
        self._members.fail(error)

    def _send(self, ranks: Ranks) -> Ranks:
        """Sends the next hop of some ranks and ends the others; returns the ranks that have sent."""
        hop = self._sent[ranks]
        done = hop == self.hops
        if done.any():
            finished = sorted(ranks[done].tolist())
            self._members.give(finished)
            ranks, hop = ranks[~done], hop[~done]
        if not len(ranks):
            return ranks
        first_half = hop < self._size - 1
        segment = np.where(first_half, ranks - hop, ranks + 1 - (hop - (self._size - 1))) % self._size
        after = (ranks + 1) % self._size
        arrives = self._pairs.send_many(ranks, after, self._nbytes[segment])
        self._sent[ranks] += 1
        for t, places in by_time(arrives):
            # With jitter, messages that overtook others' delays arrive together; they go on in the order of sending.
            if self._pairs.jitters or t not in self._arriving:
                self._clock.at(t, partial(self._receive, t))
            self._arriving.setdefault(t, []).append(after[places])
        return ranks

    def _receive(self, t: float) -> None:
        arriving = self._arriving.pop(t)
        if self._pairs.jitters and len(arriving) > 1:
            self._arriving[t] = arriving[1:]
            arriving = arriving[:1]
        ranks = np.concatenate(arriving)
        np.add.at(self._received, ranks, 1)
        self._go_on(np.unique(ranks))

    def _go_on(self, ranks: Ranks) -> None:
        """Sends what some ranks can send: their next hop, and again, while they have received the one before."""
        while True:
            sent = self._sent[ranks]
            ranks = ranks[(sent > 0) & (sent <= self._received[ranks])]
            if not len(ranks):
                return
            ranks = self._send(ranks)


def _ring_sum(tensors: list[Tensor], segments: list[Segment]) -> Tensor:
    """The sum as the ring adds it: segment ``s`` begins with rank ``s`` and goes round from there."""
    size = len(tensors)
    if size <= FEW:
        total = torch.empty_like(tensors[0])
        for start, segment in enumerate(segments):
            part = segment.of(tensors[start]) + segment.of(tensors[(start + 1) % size])
            for offset in range(2, size):
                part += segment.of(tensors[(start + offset) % size])
            segment.of(total).copy_(part)
        return total
    stacked = torch.stack(tensors)
    owner = torch.repeat_interleave(torch.tensor([segment.length for segment in segments]))
    return _added(lambda offset: stacked.gather(0, ((owner + offset) % size).unsqueeze(0))[0], size)


def _added(part: Callable[[int], Tensor], size: int) -> Tensor:
    total = part(0) + part(1)
    for offset in range(2, size):
        total += part(offset)
    return total


@dataclass(slots=True)
class _Open:
    """A collective that some ranks have not joined yet."""

    kind: tuple[object, ...] | None
    """What all ranks must agree on; ``None``: a codec encodes on each hop, so the collective runs hop by hop."""
    whole: _OwnersInOne | _RingInOne | None
    joined: set[int] = field(default_factory=set)
    error: ProtocolError | None = None


class ClosedForms:
    """The collectives under way; each begins when its first rank joins.

    Args:
      clock: virtual time.
      pairs: the links.
      size: number of ranks.
    """

    def __init__(self, clock: Clock, pairs: Pairs, size: int) -> None:
        self._clock, self._pairs, self._size = clock, pairs, size
        self._open: dict[Tag, _Open] = {}

    def has(self, collective: Collective) -> bool:
        """Whether a collective has a closed form: a ring or sums by owners."""
        return collective.run is ring or collective.owners is not None

    def enter(
        self, rank: int, collective: str, tensor: Tensor, side: Tensor, encoded: bool, tag: Tag
    ) -> InOne | None:
        """Joins a rank in the collective whose first hop has ``tag``.

        Returns:
          The rank's part; ``None`` where it is encoded on every hop, which depends on the data.
        """
        kind = None if encoded else (collective, TensorSpec.of(tensor), TensorSpec.of(side))
        there = self._open.get(tag)
        if there is None:
            whole = None if encoded else self._begin(collective, tensor, side)
            there = self._open[tag] = _Open(kind, whole)
        there.joined.add(rank)
        if len(there.joined) == self._size:
            del self._open[tag]
        if there.kind != kind and there.error is None:
            there.error = ProtocolError(
                f"rank {rank} sent another kind of segment than was due: do all ranks run the same model and recipe?"
            )
            if there.whole is not None:
                there.whole.fail(there.error)
        if there.error is not None:
            return InOne(failed(there.error), np.zeros(self._size, dtype=np.int64), 0)
        if there.whole is None:
            return None
        return InOne(there.whole.enter(rank, tensor, side), there.whole.sent(rank), there.whole.hops)

    def waits_for(self, rank: int) -> str | None:
        """Names the first rank that is missing in the collective that ``rank`` waits in; ``None``: it waits in none."""
        for tag, there in self._open.items():
            if rank in there.joined:
                missing = next(other for other in range(self._size) if other not in there.joined)
                return f"rank {missing} ({describe(tag)})"
        return None

    def _begin(self, collective: str, tensor: Tensor, side: Tensor) -> _OwnersInOne | _RingInOne:
        owners = COLLECTIVES[collective].owners
        if owners is None:
            return _RingInOne(self._clock, self._pairs, self._size, tensor, side)
        return _OwnersInOne(self._clock, self._pairs, self._size, owners(self._size), tensor, side)
