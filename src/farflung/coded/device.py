"""A device: it brings data or room, makes blocks, gives rows to other devices, and multiplies its blocks."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import torch

from farflung.coded import messages
from farflung.coded.blocks import Holding, piece_of
from farflung.coded.fetching import Fetcher, SourceLost
from farflung.coded.messages import (
    Built,
    Columns,
    Command,
    Drop,
    End,
    Failed,
    Fetch,
    Hello,
    Leaving,
    Lost,
    Malformed,
    Meet,
    Message,
    Multiply,
    Probe,
    Ready,
    Report,
    Rows,
    Welcome,
    packed,
    sent,
    unpacked,
)
from farflung.coded.queues import Queue, Work
from farflung.errors import ConfigError, FarflungError, PeerLost
from farflung.tasks import Pending, done
from farflung.types import Cost, Payload, Runtime, Tag

__all__ = ["Device"]

_COORDINATOR = 0
_COMMANDS: tuple[type[Command], ...] = (Welcome, Meet, Lost, Rows, Columns, Drop, Probe)
_MAKERS = 2
"""Blocks that are made at a time; each takes memory beside itself."""
_MOST_ASKED = 64
"""Requests of one device that may wait; more are refused."""
_NO_BLOCK = Payload(())
"""The answer to a request for a block that is not there."""


class Device:
    """One device's part of a run, for as long as its coordinator is there.

    Args:
      runtime: the world; its rank is above 0.
      holding: its own data, and the blocks that it makes.
      admit: admits another device, where that has to be asked for; see :meth:`farflung.wall.WallRuntime.admit`.
      opened: done when all devices that were admitted so far may connect.
      patience_s: the time for which the coordinator may be silent, in seconds.
      fetch_s: the time in which another device gives a few rows, in seconds.
      room_nbytes: the most bytes of blocks, its own data among them; half of the machine's memory when not given.
    """

    def __init__(
        self,
        runtime: Runtime,
        holding: Holding,
        *,
        admit: Callable[[int], Pending[None]] = lambda _: done(None),
        opened: Callable[[], Pending[None]] = lambda: done(None),
        patience_s: float = 600.0,
        fetch_s: float = 30.0,
        room_nbytes: int | None = None,
    ) -> None:
        self.refused = 0
        """Messages that were not of their form, or about a block that there is not."""
        self.first_refusal = ""
        """Why the first of them was refused."""
        self.rounds = 0
        """Rounds of which a piece was answered."""
        self._runtime, self._comm, self._holding = runtime, runtime.comm, holding
        self._admit, self._opened = admit, opened
        self._met: dict[int, Pending[None]] = {}
        """Done once a device of a rank can be asked."""
        self._asked: dict[int, deque[Fetch]] = {}
        """Requests that wait, by the device that is being answered."""
        self._patience_s = patience_s
        if room_nbytes is None:
            room_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        self._fetcher = Fetcher(runtime, holding, self._meeting, fetch_s, room_nbytes)
        self._work, self._orders = Work(), Queue[Rows | Columns]()
        self._greeted, self._leaves = False, False

    @property
    def rank(self) -> int:
        """Its number in the run."""
        return self._comm.rank

    @property
    def sent(self) -> dict[str, int]:
        """The payload bytes that it has sent, by kind of message."""
        return {kind: sum(to) for kind, to in self._comm.sent.to_json().items()}

    async def run(self) -> str:
        """Takes part until the coordinator ends it.

        Returns:
          Why it ends; empty: training is over.

        Raises:
          PeerLost: the coordinator is gone.
          DeadlinePassed: it is silent.
        """
        for service in (self._hear(), self._obey(), self._give(), *(self._make() for _ in range(_MAKERS))):
            self._runtime.launch(service)
        held = self._holding
        rows, features = (0, 0) if held.data is None else held.data.shape
        labels = torch.empty(0, dtype=torch.float64) if held.labels is None else held.labels
        self._report(Hello(held.partition, rows, features, held.coded, held.run, labels))
        self._greeted = True
        if self._leaves:
            self._report(Leaving())
        while True:
            task = await self._work.next()
            if isinstance(task, End):
                await self._runtime.launch(self._fetcher.stop())
                return task.reason
            if isinstance(task, FarflungError):
                raise task
            try:
                await self._multiply(task)
            except (Malformed, RuntimeError) as error:  # torch's, of an operand of other sizes
                self._refuse(error)

    def leave(self) -> None:
        """Asks the coordinator to let this device go; :meth:`run` ends once it may."""
        self._leaves = True
        if self._greeted:
            self._report(Leaving())

    # --- products ---------------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        """Takes in the tasks that come while another one is carried out."""
        try:
            while True:
                told = self._comm.recv(_COORDINATOR, messages.OPERAND, deadline_s=self._patience_s)
                try:
                    task = unpacked(await told, (Multiply, End))
                except Malformed as error:
                    self._refuse(error)
                    continue
                assert isinstance(task, (Multiply, End))
                self._work.put(task)
        except FarflungError as error:
            self._work.put(error)

    async def _multiply(self, task: Multiply) -> None:
        """Answers a round piece by piece, until it is over.

        Each piece of a block is a piece of the whole, so the answers of a slow device count. Each device begins with
        another piece.
        """
        blocks = self._holding.answering(task)
        if not blocks:
            return
        self.rounds += 1
        await self._runtime.compute(Cost("forward", 0), lambda: None)
        for place in range(task.pieces):
            piece = (task.first + place) % task.pieces
            begin, end = piece_of(task.length, task.pieces, piece)
            for number, block in blocks.items():
                if self._work.over(task.round):
                    return
                product = await self._runtime.compute(
                    Cost("score", block.samples(begin, end, task)), partial(block.multiply, begin, end, task)
                )
                header = torch.tensor([number, piece])
                self._send(Payload((header, product)), messages.answers(task.round))

    # --- commands ---------------------------------------------------------------------------------------------------

    async def _obey(self) -> None:
        while True:
            command = await self._comm.recv(_COORDINATOR, messages.COMMAND, deadline_s=math.inf)
            try:
                self._carry_out(unpacked(command, _COMMANDS))
            except Malformed as error:
                self._refuse(error)

    def _carry_out(self, message: Message) -> None:
        if isinstance(message, Welcome):
            self._holding.settle(message.run, message.raw)
        elif isinstance(message, Meet):
            if not 0 < message.rank < self._comm.size or message.rank == self._comm.rank:
                raise Malformed("a device that there cannot be")
            if self._meeting(message.rank).error is not None:  # an earlier device had this rank
                del self._met[message.rank]
            self._admit(message.rank).on_done(partial(_pass_on, self._meeting(message.rank)))
            if message.first:
                self._runtime.launch(self._report_ready(message.number))
        elif isinstance(message, Lost):
            self._meeting(message.rank).fail(PeerLost(message.rank, "it is gone"))
        elif isinstance(message, (Rows, Columns)):
            self._orders.put(message)
        elif isinstance(message, Drop):
            for block in message.blocks:
                self._holding.drop(block)
        elif isinstance(message, Probe):
            self._report(Probe())

    async def _report_ready(self, meeting: int) -> None:
        await self._opened()
        self._report(Ready(meeting))

    # --- blocks -----------------------------------------------------------------------------------------------------

    async def _make(self) -> None:
        """Makes the blocks that are ordered, one after the other."""
        while True:
            order = await self._orders.next()
            making = self._fetcher.rows(order) if isinstance(order, Rows) else self._fetcher.columns(order)
            await self._build(order, making)

    async def _build(self, order: Rows | Columns, making: Coroutine[Pending[Any], None, int]) -> None:
        block = order.block
        try:
            fetched_nbytes = await making
        except SourceLost as error:
            self._report(Failed(block, error.rank, _one_line(error.detail)))
        except (ConfigError, RuntimeError, ValueError) as error:
            self._refuse(error)
            self._report(Failed(block, self._comm.rank, "the order could not be carried out"))
        else:
            parts = order.parts if isinstance(order, Columns) else ()
            self._report(Built(block, tuple(part.partition for part in parts), fetched_nbytes))

    async def _give(self) -> None:
        """Takes in requests of other devices, and answers each device one request at a time."""
        while True:
            rank, payload = await self._comm.recv_any(messages.ASK, deadline_s=math.inf)
            try:
                request = unpacked(payload, (Fetch,))
                assert isinstance(request, Fetch)
                if request.reply < 0 or len(self._asked.get(rank, ())) == _MOST_ASKED:
                    raise Malformed("a request that cannot be answered")
            except Malformed as error:
                self._refuse(error)
                continue
            if rank in self._asked:
                self._asked[rank].append(request)
            else:
                self._asked[rank] = deque([request])
                self._runtime.launch(self._answer(rank))

    async def _answer(self, rank: int) -> None:
        asked = self._asked[rank]
        try:
            while asked:
                request = asked.popleft()
                await self._comm.send(self._given(request), rank, messages.reply(request.reply))
        except FarflungError:  # the device that has asked is gone
            return
        finally:
            del self._asked[rank]

    def _given(self, request: Fetch) -> Payload:
        """Gives the rows, or nothing where the block is gone: an order may be older than the end of a block."""
        if request.block not in self._holding.blocks:
            return _NO_BLOCK
        try:
            return Payload((self._holding.give(request),))
        except Malformed as error:
            self._refuse(error)
            return _NO_BLOCK

    # --- messages ---------------------------------------------------------------------------------------------------

    def _meeting(self, rank: int) -> Pending[None]:
        return self._met.setdefault(rank, Pending())

    def _refuse(self, why: Exception) -> None:
        self.refused += 1
        self.first_refusal = self.first_refusal or f"{type(why).__name__}: {_one_line(str(why))}"

    def _report(self, report: Report) -> None:
        self._send(packed(report), messages.REPORT)

    def _send(self, payload: Payload, tag: Tag) -> None:
        self._runtime.launch(sent(self._comm, payload, _COORDINATOR, tag))


def _one_line(text: str) -> str:
    """Cuts a text to the length of a message, on one line."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:200])


def _pass_on(to: Pending[None], ended: Pending[None]) -> None:
    if ended.error is None:
        to.set(None)
    else:
        to.fail(ended.error)
