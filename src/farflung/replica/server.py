"""A parameter server with bounded staleness: the server, a role of rank 0, and what replicas reach it by."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose
from farflung.comm.staging import moved
from farflung.files import deciding
from farflung.replica.stopping import StopAgreement
from farflung.tasks import Pending, done, failed
from farflung.types import (
    Channel,
    CodingCost,
    Contribution,
    Counts,
    Payload,
    Reduced,
    Runtime,
    StateSlot,
    Tag,
    TensorSpec,
)

__all__ = ["ByServer", "Inside", "Server"]


class Inside:
    """What was sent and not taken yet."""

    def __init__(self) -> None:
        self._messages: dict[Tag, Pending[Payload]] = {}
        self._error: BaseException | None = None

    def send(self, payload: Payload, tag: Tag) -> None:
        """Keeps a message until it is taken; nothing after the end."""
        self._at(tag).set(payload)

    def recv(self, tag: Tag) -> Pending[Payload]:
        message = self._at(tag)

        def taken(_: object) -> None:
            self._messages.pop(tag, None)

        message.on_done(taken)
        return message

    def forget(self, tag: Tag) -> None:
        """Drops a message."""
        self._messages.pop(tag, None)

    def end(self, error: BaseException) -> None:
        """Fails every wait, now and from now on."""
        self._error = error
        for message in list(self._messages.values()):
            message.fail(error)

    def _at(self, tag: Tag) -> Pending[Payload]:
        if self._error is not None:
            return failed(self._error)
        return self._messages.setdefault(tag, Pending())


UPDATE = "update"
"""The name of the decision whose update is added next; its step counts the updates of all replicas."""
PUSH, ANSWER = 0, 1
"""Hops of an exchange; an answer comes at the second or, behind signs of life, at one of those that follow."""


class _Post(Protocol):
    """A channel, as far as it is needed here."""

    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]: ...
    def recv(self, src: int, hop: int, expect: tuple[TensorSpec, ...] | None = None) -> Pending[Payload]: ...


@dataclass(slots=True)
class _Visit:
    """An update of a replica's, from when it has come until it is answered.

    Args:
      channels: of its exchanges, by part.
      pushed: update and side vector of each part.
    """

    channels: Mapping[int, ExchangeChannel]
    pushed: Mapping[int, tuple[Tensor, Tensor]]
    added: bool = False
    hop: int = ANSWER
    answered: Pending[None] = field(default_factory=Pending)


class Server:
    """Adds updates as they arrive, and answers a replica once the slowest is near enough.

    It belongs to the thread that carries exchanges. For each replica a task waits for its next update from when the one
    before was answered, so that a rank that falls silent is named, and one held up by it is not. A parameter tensor is
    never written in: answers on their way may share it.

    Args:
      runtime: rank 0's.
      bound: the most steps that a replica is ahead of the slowest; ``None``: any number.
      parameters: of each part, flat.
      numbers: how many ride beside each update and answer.
      begin: the steps that all have done.
      steps: the steps after which the run ends.
      meets: whether all wait for all after so many steps.
      stop: agrees on the last step where the run is asked to stop; nothing is answered before it has.
    """

    def __init__(
        self,
        runtime: Runtime,
        bound: int | None,
        parameters: Mapping[int, Tensor],
        numbers: int,
        begin: int,
        steps: int,
        meets: Callable[[int], bool],
        stop: StopAgreement,
    ) -> None:
        self._runtime, self._bound, self._meets = runtime, bound, meets
        self._parameters = dict(parameters)
        self._numbers = numbers
        size = runtime.comm.size
        self._clocks = [begin] * size
        """Updates of each replica that have been added, those of earlier legs of the run among them."""
        self._news = [self._nothing() for _ in range(size)]
        """What has come beside updates since a replica was answered, summed in their order."""
        self._visits: dict[int, _Visit] = {}
        """By rank, in the order in which they arrived."""
        self._steps, self._stop = steps, stop
        self._inside = Inside()
        self._sent: Counts = np.zeros(size, dtype=np.int64)
        """Bytes to each of answers that count as no exchange's of rank 0 yet."""
        self._counts: Channel | None = None
        for rank in range(size):
            runtime.launch(self._serve(rank)).on_done(self._ended)
        stop.agreed.on_done(lambda _: self._answer(others_moved=False))

    @property
    def _until(self) -> float:
        """The steps after which the run ends, as far as is known."""
        return min(self._steps, self._stop.last_step + 1)

    def post_of_own(self, channel: Channel) -> _Post:
        """How rank 0 reaches the server in it; what is sent until it is answered counts as this exchange's."""
        self._counts = channel
        return self._post(channel.rank, channel)

    def _post(self, rank: int, channel: Channel) -> _Post:
        return _OwnPost(self._inside, channel) if rank == self._runtime.comm.rank else channel

    async def _serve(self, rank: int) -> None:
        """Takes one replica's updates, one after the other."""
        comm = self._runtime.comm
        while (step := self._clocks[rank]) < self._until:
            channels: dict[int, ExchangeChannel] = {}
            pushed: dict[int, tuple[Tensor, Tensor]] = {}
            for part, parameters in self._parameters.items():
                channel = channels[part] = ExchangeChannel(comm, Purpose.STEP.at(step), part)
                expect = TensorSpec.of(parameters), TensorSpec((self._numbers,), torch.float64)
                update, side = (await self._post(rank, channel).recv(rank, PUSH, expect)).tensors()
                pushed[part] = moved(update, parameters.device), side
            visit = self._visits[rank] = _Visit(channels, pushed)
            while (whose := self._next()) is not None:
                self._add(whose)
            await visit.answered

    def _next(self) -> int | None:
        """Whose update is to be added now; ``None``: there is none, or that of another is waited for."""
        came = [rank for rank, visit in self._visits.items() if not visit.added]
        told = self._runtime.decisions.replayed(UPDATE, sum(self._clocks), self._runtime.comm.rank)
        if told is None or not came:
            return next(iter(came), None)
        with deciding(told.name, told.step):
            whose: Any = told.value
            due = [
                rank
                for rank, clock in enumerate(self._clocks)
                if rank in came or (rank not in self._visits and clock < self._until)
            ]
            if type(whose) is not int or whose not in due:
                raise ValueError(f"no update of rank {whose!r} is due")
        return whose if whose in came else None

    def _add(self, rank: int) -> None:
        """Adds an update that has come, and answers all ranks that may go on then."""
        self._runtime.decide_own(UPDATE, sum(self._clocks), lambda: rank)
        visit, lowest = self._visits[rank], min(self._clocks)
        visit.added = True
        for part, (update, side) in visit.pushed.items():
            share = float(side[0]) / len(self._clocks)
            self._parameters[part] = visit.channels[part].compute(
                CodingCost("add", "", update.numel()),
                partial(torch.add, self._parameters[part], update, alpha=share),
            )
            for news in self._news:
                news[part] += side
        self._clocks[rank] += 1
        self._answer(others_moved=min(self._clocks) > lowest)

    def _answer(self, *, others_moved: bool) -> None:
        """Answers the ranks that may go on, rank 0 behind the others, whose bytes it counts.

        Others may have to wait until the slowest has made many steps more. Each time it has made one they are given a
        sign of life, so that a wait is never longer than a step of a healthy replica.
        """
        # A rank that sends an update of the last step has reported before, so the request is known.
        if self._stop.is_asked and not self._stop.agreed.done:
            return
        lowest = min(self._clocks)
        for rank in (*range(1, len(self._clocks)), 0):
            visit = self._visits.get(rank)
            if visit is None or not visit.added:
                continue
            clock = self._clocks[rank]
            together = clock == self._until or self._meets(clock) or self._bound == 0
            bound = 0 if together else self._bound
            if bound is None or clock - lowest <= bound:
                del self._visits[rank]
                self._send(rank, visit, together=together)
            elif others_moved:
                for channel in visit.channels.values():
                    self._post(rank, channel).send(Payload(()), rank, visit.hop)
                visit.hop += 1

    def _send(self, rank: int, visit: _Visit, *, together: bool) -> None:
        told, self._news[rank] = self._news[rank], self._nothing()
        for part, channel in visit.channels.items():
            side = torch.cat([torch.tensor([together], dtype=torch.float64), told[part]])
            self._post(rank, channel).send(Payload((self._parameters[part], side)), rank, visit.hop)
            self._sent += channel.sent
        if rank == self._runtime.comm.rank and self._counts is not None:
            self._counts.count(self._sent, for_it=True)
            self._sent = np.zeros_like(self._sent)
        visit.answered.set(None)

    def _nothing(self) -> dict[int, Tensor]:
        return {part: torch.zeros(self._numbers, dtype=torch.float64) for part in self._parameters}

    def _ended(self, task: Pending[None]) -> None:
        """A task that fails ends the waits inside rank 0, which have no deadline of their own."""
        if task.error is not None:
            self._inside.end(task.error)


@dataclass(frozen=True, slots=True)
class _OwnPost:
    """One exchange between rank 0 and the server in it, which sends nothing over the network."""

    inside: Inside
    channel: Channel

    def send(self, payload: Payload, dst: int, hop: int) -> Pending[None]:
        del dst
        self.inside.send(payload, self.channel.tag(hop))
        return done(None)

    def recv(self, src: int, hop: int, expect: tuple[TensorSpec, ...] | None = None) -> Pending[Payload]:
        del src, expect
        return self.inside.recv(self.channel.tag(hop))


class ByServer:
    """A replica's exchanges with the server; see :class:`farflung.replica.in_flight.Carrier`.

    Args:
      runtime: the world.
      bound: see :class:`Server`.
      rider: how many numbers ride beside an update.
      steps: see :class:`Server`.
      meets: see :class:`Server`.
      stop: see :class:`Server`.
    """

    def __init__(
        self,
        runtime: Runtime,
        bound: int | None,
        rider: int,
        steps: int,
        meets: Callable[[int], bool],
        stop: StopAgreement,
    ) -> None:
        self.together = True
        """Whether all replicas had come to the step of the last answer, and none was beyond it."""
        self._runtime, self._bound, self._numbers = runtime, bound, 1 + rider
        self._steps, self._meets, self._stop = steps, meets, stop
        self._server: Server | None = None

    def open(self, step: int, parameters: Callable[[], Mapping[int, Tensor]]) -> None:
        """Before a step; at the first one rank 0 becomes the server.

        Args:
          step: the steps that all replicas have done.
          parameters: gives those of each part, flat; alike on all.
        """
        if self._server is None and self._runtime.comm.rank == 0:
            self._server = Server(
                self._runtime,
                self._bound,
                parameters(),
                self._numbers,
                step,
                self._steps,
                self._meets,
                self._stop,
            )

    async def reduce(self, channel: Channel, slot: StateSlot, own: Contribution, *, step: int) -> Reduced:
        """Sends an update, and brings the server's parameters in place of a mean."""
        del slot, step
        post: _Post = channel if self._server is None else self._server.post_of_own(channel)
        side = torch.cat([torch.tensor([own.weight], dtype=torch.float64), own.rider])
        post.send(Payload((own.tensor, side)), 0, PUSH)
        for hop in itertools.count(ANSWER):
            answer = list((await post.recv(0, hop)).tensors())
            if answer:
                break
        parameters, told = answer
        self.together = bool(told[0])
        return Reduced(moved(parameters, own.tensor.device), float(told[1]), told[2:])
