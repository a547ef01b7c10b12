"""The all-reduce by owners among groups of ranks that are alike: one message for all from one group to another."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from farflung.comm.collectives.sharded import shard_pieces
from farflung.network.wiring import Group
from farflung.sim.clock import Carrier, Clock
from farflung.sim.lane import Ends, Lane
from farflung.types import CodingCost, Counts

__all__ = ["Devices", "GroupedReduce", "ReduceShape"]


class ReduceShape(NamedTuple):
    """What an all-reduce moves.

    Args:
      owners: how many ranks own a shard, the first ones.
      size: number of ranks.
      numel: of the tensor.
      element_nbytes: of one element.
      side_nbytes: of the vector that rides along.
    """

    owners: int
    size: int
    numel: int
    element_nbytes: int
    side_nbytes: int

    @property
    def back_nbytes(self) -> int:
        """The bytes of side sums sent with the results; 0 where all ranks are owners and receive every side vector."""
        return 0 if self.owners == self.size else self.side_nbytes

    @property
    def cuts(self) -> tuple[int, int]:
        """The ranks from which on shards are shorter, and from which on there are none."""
        return self.numel % self.owners, self.owners

    def pieces_nbytes(self, owner: int) -> list[int]:
        return [
            length * self.element_nbytes
            for length in shard_pieces(self.numel, self.element_nbytes, self.owners, owner)
        ]

    def sent(self, rank: int) -> Counts:
        """Bytes that one rank sends to each: its part of every shard to the owner, and its own shard's sum to all."""
        counts = np.zeros(self.size, dtype=np.int64)
        shards = counts[: self.owners]
        shards += self.numel // self.owners * self.element_nbytes
        shards[: self.numel % self.owners] += self.element_nbytes
        back_nbytes = int(shards[rank]) + self.back_nbytes if rank < self.owners else 0
        shards += self.side_nbytes
        counts += back_nbytes
        counts[rank] = 0
        return counts


class Devices(NamedTuple):
    """What the groups' devices are charged by.

    Args:
      clock: virtual time.
      lanes: of each group; ``None`` where its devices have no rates.
      latency_s: of the link from one group to another.
    """

    clock: Clock
    lanes: Sequence[Lane | None]
    latency_s: Callable[[int, int], float]


@dataclass(slots=True)
class _Part:
    """A group's progress."""

    pieces_nbytes: list[int]
    sources: int
    """The number of groups that send to it."""
    answers: int
    """The number of messages that come back to it."""
    entered: bool = False
    summed: int = 0
    answered: int = 0


class GroupedReduce:
    """Each group does what each of its ranks would; see :func:`farflung.comm.collectives.direct`.

    Args:
      carrier: between groups, by their numbers.
      groups: of ranks that are alike to the network and own shards of one length.
      shape: what moves.
      ended: called with a group's number when its ranks have the sum.
      devices: what adding and messages are charged to; where not given, they take no time. A group's messages to
        another set out with the first and are there with the last, and each device copies what it gets as it comes.
    """

    def __init__(
        self,
        carrier: Carrier,
        groups: Sequence[Group],
        shape: ReduceShape,
        ended: Callable[[int], None],
        devices: Devices | None = None,
    ) -> None:
        self._carrier, self._groups, self._shape, self._ended = carrier, groups, shape, ended
        self._devices = devices
        owning = [number for number, group in enumerate(groups) if group.first < shape.owners]
        self._owning = owning
        pieces = len(shape.pieces_nbytes(0))
        self._came = {number: [0] * pieces for number in owning}
        self._parts = [
            _Part(
                shape.pieces_nbytes(group.first) if number in self._came else [],
                self._others(number, range(len(groups))),
                pieces * self._others(number, owning),
            )
            for number, group in enumerate(groups)
        ]

    def _others(self, number: int, among: Sequence[int]) -> int:
        """Counts the groups in ``among`` that a rank of group ``number`` exchanges messages with."""
        return sum(self._meet(number, other) for other in among)

    def _meet(self, one: int, other: int) -> bool:
        return one != other or self._groups[one].count > 1

    def enter(self, number: int) -> None:
        """Sends a group's part of each shard to the owners."""
        self._parts[number].entered = True
        for piece in range(len(self._came[self._owning[0]])):
            for owner in self._owning:
                if self._meet(number, owner):
                    riding = self._shape.side_nbytes if piece == 0 else 0
                    nbytes = self._parts[owner].pieces_nbytes[piece] + riding
                    self._send(number, owner, nbytes, self._gathers(owner, piece))
        self._spread(number)

    def _send(self, src: int, dst: int, nbytes: int, arrived: Callable[[float], None]) -> None:
        """Sends a message from each device of one group to each of another."""

        def move(came: Callable[[float], None]) -> None:
            self._carrier.send(src, dst, nbytes, 0, came)

        if self._devices is None:
            move(arrived)
            return
        clock, lanes, same = self._devices.clock, self._devices.lanes, src == dst
        ends = Ends(lanes[src], lanes[dst], self._groups[dst].count - same, self._groups[src].count - same)
        ends.carry(clock, nbytes, self._devices.latency_s(src, dst), move, arrived)

    def _charge(self, number: int, operation: str, nbytes: int) -> None:
        """Charges each device of a group for adding or copying ``nbytes`` bytes."""
        if self._devices is not None and (lane := self._devices.lanes[number]) is not None:
            lane.charge(CodingCost(operation, "", nbytes // self._shape.element_nbytes))

    def _gathers(self, owner: int, piece: int) -> Callable[[float], None]:
        def gather(t: float) -> None:
            del t
            self._came[owner][piece] += 1
            self._spread(owner)

        return gather

    def _spread(self, number: int) -> None:
        """Sends an owner's sums to all ranks, piece by piece, once the pieces of all ranks have arrived."""
        part = self._parts[number]
        while part.entered and part.summed < len(part.pieces_nbytes):
            if self._came[number][part.summed] < part.sources:
                return
            own = part.pieces_nbytes[part.summed]
            nbytes = own + (self._shape.back_nbytes if part.summed == 0 else 0)
            part.summed += 1
            self._charge(number, "add", own * (self._shape.size - 1))
            for other in range(len(self._groups)):
                if self._meet(number, other):
                    count = self._groups[number].count - (number == other)
                    self._send(number, other, nbytes, self._answers(other, count * own))
            self._charge(number, "copy", own)
        self._end(number)

    def _answers(self, number: int, dense_nbytes: int) -> Callable[[float], None]:
        def answer(t: float) -> None:
            del t
            self._parts[number].answered += 1
            self._charge(number, "copy", dense_nbytes)
            self._end(number)

        return answer

    def _end(self, number: int) -> None:
        part = self._parts[number]
        if part.entered and part.answered == part.answers and part.summed == len(part.pieces_nbytes):
            part.answers = -1  # once
            self._ended(number)
