"""The all-reduce by owners of shards, as rows of messages."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from farflung.comm.collectives.segments import sum_in_order
from farflung.comm.collectives.sharded import shards_of
from farflung.comm.virtual.clock import Clock
from farflung.comm.virtual.pairs import Pairs, Row
from farflung.tasks import Pending

__all__ = ["Members", "OwnersInOne", "by_time"]


class Members:
    """What the ranks of one collective have given, and who still waits for the sum."""

    def __init__(self, size: int) -> None:
        self.tensors: list[Tensor] = [torch.empty(0)] * size
        self.sides: list[Tensor] = [torch.empty(0)] * size
        self._waits: dict[int, Pending[tuple[Tensor, Tensor]]] = {}
        self._total: Tensor | None = None
        self._total_side: Tensor | None = None

    def __len__(self) -> int:
        return len(self._waits)

    def join(self, rank: int, tensor: Tensor, side: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        """A rank joins."""
        self.tensors[rank], self.sides[rank] = tensor, side
        self._waits[rank] = Pending()
        return self._waits[rank]

    def give(self, ranks: list[int], add: Callable[[list[Tensor]], Tensor]) -> None:
        """The collective is over for some ranks: each gets the sum, added once for all, in its own tensor."""
        if self._total is None or self._total_side is None:
            self._total = add(self.tensors)
            self._total_side = sum_in_order(self.sides)
        for rank in ranks:
            own = self.tensors[rank]
            own.copy_(self._total)
            self._waits[rank].set((own, self._total_side.clone()))

    def fail(self, error: BaseException) -> None:
        """Ends every wait."""
        for pending in self._waits.values():
            pending.fail(error)


class OwnersInOne:
    """Parts go to the owners of the shards, sums come back; ranks join when they like.

    On links that nothing shares, a message's arrival is known when it is sent. So a rank that joins sends a row of
    messages, an owner knows when it can add as soon as the last rank has joined, and sends its row at that time:
    hop by hop, but with two events for each time at which something happens instead of some for each message.
    """

    def __init__(
        self, clock: Clock, pairs: Pairs, size: int, owners: int, tensor: Tensor, side: Tensor
    ) -> None:
        self._clock, self._pairs, self._size, self._owners = clock, pairs, size, owners
        self._shards = shards_of(tensor.numel(), tensor.element_size(), owners)
        lengths = np.array([[segment.length for segment in shard] for shard in self._shards], dtype=np.int64)
        self._nbytes = lengths.T * tensor.element_size()  # by piece and owner
        self._dense_nbytes, self._side_nbytes = tensor.nbytes, side.nbytes
        self._back_nbytes = 0 if owners == size else side.nbytes
        self._pieces = len(self._nbytes)
        self.hops = 2 * self._pieces
        self._members = Members(size)
        self._complete = np.zeros((self._pieces, owners))
        self._finish = np.zeros(size)
        self._to_spread = owners * self._pieces

    def sent_nbytes(self, rank: int) -> int:
        """All that one rank sends."""
        if rank >= self._owners:
            return self._dense_nbytes + self._owners * self._side_nbytes
        own = int(self._nbytes[:, rank].sum())
        there = self._dense_nbytes - own + (self._owners - 1) * self._side_nbytes
        return there + (self._size - 1) * (own + self._back_nbytes)

    def enter(self, rank: int, tensor: Tensor, side: Tensor) -> Pending[tuple[Tensor, Tensor]]:
        """A rank sends its part of each shard."""
        now = self._clock.now()
        joined = self._members.join(rank, tensor, side)
        for piece in range(self._pieces):
            bits = 8.0 * (self._nbytes[piece] + (self._side_nbytes if piece == 0 else 0))
            arrives = self._pairs.send_many(rank, slice(0, self._owners), bits)
            if rank < self._owners:
                arrives[rank] = now
            np.maximum(self._complete[piece], arrives, out=self._complete[piece])
        if len(self._members) == self._size:
            self._complete_by(rank)
        return joined

    def fail(self, error: BaseException) -> None:
        """Ends the wait of all who have joined."""
        self._members.fail(error)

    def _complete_by(self, last: int) -> None:
        """The last rank has joined: when each owner can send what back is known."""
        np.maximum.accumulate(self._complete, axis=0, out=self._complete)  # an owner adds piece after piece
        for t, places in by_time(self._complete.T.reshape(-1)):
            # What it finds complete itself it sends before it does anything else.
            own = [place for place in places if place // self._pieces == last and t == self._clock.now()]
            others = [place for place in places if place not in own] if own else places
            if others:
                self._clock.at(t, lambda places=others: self._spread(places))  # type: ignore[misc]
            if own:
                self._spread(own)

    def _spread(self, places: list[int]) -> None:
        """Owners send sums to everybody; a place is an owner and a piece."""
        now = self._clock.now()
        for owner, piece in (divmod(place, self._pieces) for place in places):
            bits = 8.0 * (self._nbytes[piece, owner] + (self._back_nbytes if piece == 0 else 0))
            arrives = self._pairs.send_many(owner, slice(0, self._size), np.full(self._size, bits))
            arrives[owner] = now
            np.maximum(self._finish, arrives, out=self._finish)
        self._to_spread -= len(places)
        if not self._to_spread:
            for t, ranks in by_time(self._finish):
                self._clock.at(t, lambda ranks=ranks: self._members.give(ranks, sum_in_order))  # type: ignore[misc]


def by_time(times: Row) -> list[tuple[float, list[int]]]:
    """The places of each distinct time, in order."""
    found: dict[float, list[int]] = {}
    for place, t in enumerate(times.tolist()):
        found.setdefault(t, []).append(place)
    return list(found.items())
