"""Collectives that all ranks join at one time, computed for groups of ranks that are alike.

Where flows share capacities, nothing can be known of a message before it has arrived. But ranks of one site that
begin together and own shards of one length see the same at all times, so one flow for each pair of groups stands for
all of them; see :class:`farflung.network.wiring.Bundles`. That holds while nothing else is on the way. When something
else comes, what was computed for groups is done again message by message, up to that moment, and goes on like that.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.comm.channel import ExchangeChannel
from farflung.comm.collectives import COLLECTIVES, Collective
from farflung.network import NetworkProfile
from farflung.network.wiring import Bundles, groups_of
from farflung.sim.clock import Clock, VirtualClock
from farflung.sim.closed_form import InOne, Members
from farflung.sim.flows import AFTER_ALL_ELSE, Flows
from farflung.sim.groups import GroupedReduce, ReduceShape
from farflung.tasks import Pending, Task
from farflung.types import Communicator, Tag

__all__ = ["Symmetric"]

Kind = tuple[str, ReduceShape, torch.dtype]
"""The collective's name, and what it moves."""


@dataclass(slots=True)
class _Joining:
    """A collective that ranks join at the present virtual time."""

    tag: Tag
    members: Members
    kinds: dict[int, Kind]
    results: dict[int, Pending[tuple[Tensor, Tensor]]]


@dataclass(slots=True)
class _Running:
    """A collective of all ranks, in groups."""

    tag: Tag
    members: Members
    kind: Kind
    side: Tensor
    begin_s: float


class Symmetric:
    """What all ranks join together.

    Args:
      clock: virtual time.
      profile: without jitter.
      idle: whether no message is on its way.
      hop_by_hop: a communicator of a rank, for collectives that go message by message. What it counts is left aside:
        ranks have counted their bytes when they joined.
      sealed: whether connections are encrypted.
      replay: takes over from groups; called with what runs on a clock of its own up to the present moment.
    """

    def __init__(
        self,
        clock: Clock,
        profile: NetworkProfile,
        idle: Callable[[], bool],
        hop_by_hop: Callable[[int], Communicator],
        sealed: bool,
        replay: Callable[[float, Callable[[Clock, Callable[[int], Communicator]], None]], None],
    ) -> None:
        assert profile.nodes is not None
        self._clock, self._profile, self._size = clock, profile, profile.nodes
        self._idle, self._hop_by_hop, self._sealed, self._replay = idle, hop_by_hop, sealed, replay
        self._joining: dict[Tag, _Joining] = {}
        self._refused: dict[Tag, int] = {}
        self._running: list[_Running] = []
        self._cuts: set[int] = set()
        self._version = 0

    def has(self, collective: Collective) -> bool:
        """Whether a collective can be computed in groups: its sums are made by owners."""
        return collective.owners is not None

    def enter(
        self, rank: int, collective: str, tensor: Tensor, side: Tensor, encoded: bool, tag: Tag
    ) -> InOne | None:
        """Joins a rank in the collective whose first hop has ``tag``; ``None`` where it runs hop by hop."""
        if tag in self._refused:
            self._refused[tag] -= 1
            if not self._refused[tag]:
                del self._refused[tag]
            return None
        owners = COLLECTIVES[collective].owners
        if encoded or owners is None:
            return None
        shape = ReduceShape(
            owners(self._size), self._size, tensor.numel(), tensor.element_size(), side.nbytes
        )
        if tag not in self._joining:
            self._joining[tag] = _Joining(tag, Members(self._size), {}, {})
            self._clock.at(self._clock.now(), lambda: self._close(tag), AFTER_ALL_ELSE)
        joining = self._joining[tag]
        joining.kinds[rank] = collective, shape, tensor.dtype
        joining.results[rank] = joining.members.join(rank, tensor, side)
        hops = 2 * len(shape.pieces_nbytes(0))
        return InOne(joining.results[rank], shape.sent(rank), hops)

    def interrupt(self) -> None:
        """Continues the running collectives message by message, before another message is sent."""
        if not self._running:
            return
        running, self._running = self._running, []
        self._version += 1

        def again(clock: Clock, comm: Callable[[int], Communicator]) -> None:
            for one in running:
                clock.at(one.begin_s, lambda one=one: _start_again(clock, comm, one, self._size))  # type: ignore[misc]

        self._replay(running[0].begin_s, again)

    def _close(self, tag: Tag) -> None:
        """Starts a collective in groups if all ranks have joined at one time, and otherwise hop by hop."""
        joining = self._joining.pop(tag)
        kinds = set(joining.kinds.values())
        if len(joining.kinds) == self._size and len(kinds) == 1 and (self._running or self._idle()):
            kind = kinds.pop()
            self._cuts.update(kind[1].cuts)
            self._running.append(
                _Running(tag, joining.members, kind, joining.members.sides[0], self._clock.now())
            )
            self._compute()
            return
        self.interrupt()
        self._refused[tag] = self._size
        for rank, result in joining.results.items():
            tensor, side = joining.members.tensors[rank], joining.members.sides[rank]
            comm = self._hop_by_hop(rank)
            task = Task(_hops(comm, tag, joining.kinds[rank][0], tensor, side), self._clock.soon)
            task.on_done(lambda task, result=result: _pass_on(task, result))  # type: ignore[misc]

    def _compute(self) -> None:
        """Schedules the ends of the running collectives, computed from the last time without messages under way."""
        self._version += 1
        groups = groups_of(self._profile, 0, self._cuts)
        clock = VirtualClock(self._running[0].begin_s)
        flows = Flows(clock, Bundles(self._profile, groups), seed=0, sealed=self._sealed)
        ends: dict[float, list[tuple[_Running, Iterable[int]]]] = {}

        def begin(one: _Running) -> None:
            def ended(number: int) -> None:
                group = groups[number]
                ranks = range(group.first, group.first + group.count)
                ends.setdefault(clock.now(), []).append((one, ranks))

            reduce = GroupedReduce(flows, groups, one.kind[1], ended)
            for number in range(len(groups)):
                reduce.enter(number)

        for one in self._running:
            clock.at(one.begin_s, lambda one=one: begin(one))  # type: ignore[misc]
        clock.run()
        version = self._version
        for t, over in ends.items():
            if t >= self._clock.now():
                self._clock.at(t, lambda over=over: self._end(over, version))  # type: ignore[misc]

    def _end(self, over: Iterable[tuple[_Running, Iterable[int]]], version: int) -> None:
        if version == self._version:
            for one, ranks in over:
                one.members.give(ranks)
            if not any(one.members.waiting for one in self._running):
                self._running = []


def _start_again(clock: Clock, comm: Callable[[int], Communicator], one: _Running, size: int) -> None:
    """Runs a collective of all ranks hop by hop on zero tensors, for its times alone."""
    collective, shape, dtype = one.kind
    tensor = torch.zeros(shape.numel, dtype=dtype)
    for rank in range(size):
        task = Task(_hops(comm(rank), one.tag, collective, tensor, one.side), clock.soon)
        task.on_done(lambda _, rank=rank: one.members.give([rank]))  # type: ignore[misc]


def _hops(
    comm: Communicator, tag: Tag, collective: str, tensor: Tensor, side: Tensor
) -> Coroutine[Any, None, tuple[Tensor, Tensor]]:
    channel = ExchangeChannel(comm, tag.exchange, tag.part)
    channel.hops(tag.hop)

    async def run() -> tuple[Tensor, Tensor]:
        return await COLLECTIVES[collective].run(channel, tensor, side)

    return run()


def _pass_on(task: Pending[tuple[Tensor, Tensor]], result: Pending[tuple[Tensor, Tensor]]) -> None:
    if task.error is not None:
        result.fail(task.error)
    else:
        result.set(task.result())
