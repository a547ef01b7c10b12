"""The ring all-reduce, with the messages of all ranks at one time computed together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from torch import Tensor

from farflung.comm.collectives.segments import cut
from farflung.sim.clock import Clock
from farflung.sim.members import Members
from farflung.sim.pairs import Pairs, Ranks, by_time
from farflung.tasks import Pending
from farflung.types import Counts, Segment

__all__ = ["RingInOne", "ring_sum"]

FEW = 64
"""Up to so many ranks segments are added one by one; beyond, all of them together from a stack of the tensors."""


class RingInOne:
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
        self._members = Members(size, lambda tensors: ring_sum(tensors, self._segments))
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


def ring_sum(tensors: list[Tensor], segments: list[Segment]) -> Tensor:
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
