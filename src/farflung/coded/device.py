"""A device: it brings data or room, makes coded blocks, and multiplies what it holds."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import torch

from farflung.coded import tags
from farflung.coded.blocks import Holding, piece_of
from farflung.coded.codes import CODES
from farflung.coded.fetching import Fetcher, SourceLost
from farflung.coded.giving import Giver
from farflung.coded.messages import (
    Built,
    Columns,
    Command,
    Drop,
    End,
    Failed,
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
    Source,
    Welcome,
    packed,
    unpacked,
)
from farflung.coded.sending import sent
from farflung.coded.work import Queue, Work
from farflung.errors import ConfigError, FarflungError, PeerLost
from farflung.spec import build
from farflung.tasks import Pending, done
from farflung.types import Cost, Payload, Runtime, Tag

__all__ = ["Device"]

COORDINATOR = 0
_COMMANDS: tuple[type[Command], ...] = (Welcome, Meet, Lost, Rows, Columns, Drop, Probe)
_AT_ONCE = 2
"""Blocks that are made at a time; each takes memory beside itself."""


class Device:
    """One device's part of a run, for as long as it hears of a coordinator.

    Args:
      runtime: the world; its rank is above 0.
      holding: its own data, and the blocks that it makes.
      admit: lets another device in, where that has to be asked for; see :meth:`farflung.runtime.WallRuntime.admit`.
      opened: done when all that were let in so far may come.
      patience_s: how long the coordinator may be silent, in seconds.
      fetch_s: how long another device may take to give a few rows, in seconds.
      room_nbytes: what blocks may take, its own data among them; half of the machine's memory when not given.
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
        """Messages that were not of their form, or spoke of what there is not."""
        self.first_refusal = ""
        """Why the first of them was refused."""
        self.rounds = 0
        """Rounds of which it has answered something."""
        self._runtime, self._comm, self._holding = runtime, runtime.comm, holding
        self._admit, self._opened = admit, opened
        self._met: dict[int, Pending[None]] = {}
        self._patience_s = patience_s
        room_nbytes = _machine_nbytes() // 2 if room_nbytes is None else room_nbytes
        self._fetcher = Fetcher(runtime, holding, self._meeting, fetch_s, room_nbytes)
        self._work, self._orders = Work(), Queue[Rows | Columns]()
        self._code, self._seed = "", 0
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
        giver = Giver(self._runtime, self._holding, self._refuse)
        for service in (self._hear(), self._obey(), giver.run(), *(self._make() for _ in range(_AT_ONCE))):
            self._runtime.launch(service)
        brought = self._holding.data
        rows, features = (0, 0) if brought is None else brought.shape
        labels = torch.empty(0, dtype=torch.float64) if self._holding.labels is None else self._holding.labels
        held = self._holding
        self._report(Hello(held.partition, held.raw, rows, features, held.coded, held.run, labels))
        self._greeted = True
        if self._leaves:
            self._report(Leaving())
        while True:
            task = await self._work.next()
            if isinstance(task, End):
                return task.reason
            if isinstance(task, FarflungError):
                raise task
            try:
                await self._multiply(task)
            except (Malformed, RuntimeError) as error:  # torch's, of an operand of other sizes
                self._refuse(error)

    def leave(self) -> None:
        """Tells the coordinator that this device would like to go; :meth:`run` ends once it may."""
        self._leaves = True
        if self._greeted:
            self._report(Leaving())

    # --- products ---------------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        """Takes in what is to be multiplied, while something else is."""
        try:
            while True:
                told = self._comm.recv(COORDINATOR, tags.OPERAND, deadline_s=self._patience_s)
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
        """Answers a round piece by piece, until the coordinator has what it needs.

        Each piece of a block is a piece of the whole, so that what a slow device has done counts. Devices begin with
        different ones.
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
                self._send(Payload((header, product)), tags.answers(task.round))

    # --- commands ---------------------------------------------------------------------------------------------------

    async def _obey(self) -> None:
        while True:
            command = await self._comm.recv(COORDINATOR, tags.COMMAND, deadline_s=math.inf)
            try:
                self._carry_out(unpacked(command, _COMMANDS))
            except Malformed as error:
                self._refuse(error)

    def _carry_out(self, message: Message) -> None:
        if isinstance(message, Welcome):
            if ":" in message.code:  # a code of somebody's own would be imported
                raise Malformed("a code that is not of the package")
            self._holding.settle(message.run, message.raw)
            self._code, self._seed = message.code, message.seed
        elif isinstance(message, Meet):
            if not 0 < message.rank < self._comm.size or message.rank == self._comm.rank:
                raise Malformed("a device that there cannot be")
            if self._meeting(message.rank).error is not None:  # another was there under this rank
                del self._met[message.rank]
            self._admit(message.rank).on_done(partial(_pass_on, self._meeting(message.rank)))
            if message.first:
                self._runtime.launch(self._says_ready(message.rank))
        elif isinstance(message, Lost):
            self._meeting(message.rank).fail(PeerLost(message.rank, "it is gone"))
        elif isinstance(message, (Rows, Columns)):
            self._orders.put(message)
        elif isinstance(message, Drop):
            for block in message.blocks:
                self._holding.drop(block)
        elif isinstance(message, Probe):
            self._report(Probe(message.round))

    async def _says_ready(self, rank: int) -> None:
        await self._opened()
        self._report(Ready(rank))

    async def _make(self) -> None:
        """Makes the blocks that are ordered, one after the other."""
        while True:
            order = await self._orders.next()
            making = self._rows(order) if isinstance(order, Rows) else self._fetcher.columns(order)
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

    async def _rows(self, order: Rows) -> int:
        sources = order.sources
        if order.index >= 0:
            if not order.raw:
                raise Malformed("a row of no columns")
            weights = build("code", self._code, CODES).row(order.index, len(order.raw), self._seed)
            sources = tuple(
                Source(raw.rank, raw.block, float(weight))
                for raw, weight in zip(order.raw, weights, strict=True)
                if weight
            )
        return await self._fetcher.rows(order, sources)

    def _meeting(self, rank: int) -> Pending[None]:
        return self._met.setdefault(rank, Pending())

    def _refuse(self, why: Exception) -> None:
        self.refused += 1
        self.first_refusal = self.first_refusal or f"{type(why).__name__}: {_one_line(str(why))}"

    def _report(self, report: Report) -> None:
        self._send(packed(report), tags.REPORT)

    def _send(self, payload: Payload, tag: Tag) -> None:
        self._runtime.launch(sent(self._comm, payload, COORDINATOR, tag))


def _one_line(text: str) -> str:
    """As much of a text as a message has."""
    return "".join(sign if sign.isprintable() else " " for sign in text[:200])


def _machine_nbytes() -> int:
    """The memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _pass_on(to: Pending[None], ended: Pending[None]) -> None:
    if ended.error is None:
        to.set(None)
    else:
        to.fail(ended.error)
