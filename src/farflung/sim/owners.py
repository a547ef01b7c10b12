"""The all-reduce by owners of shards, as rows of messages."""

from __future__ import annotations

from functools import partial

import numpy as np
from torch import Tensor

from farflung.sim.clock import Clock
from farflung.sim.groups import ReduceShape
from farflung.sim.members import Members
from farflung.sim.pairs import Pairs, by_time
from farflung.tasks import Pending
from farflung.types import Counts

__all__ = ["OwnersInOne"]


class OwnersInOne:
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
