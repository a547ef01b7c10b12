"""A device: it brings data or room, makes coded blocks, and multiplies what it holds."""

from __future__ import annotations

import math
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import torch

from farflung.coded import tags
from farflung.coded.blocks import Holding, piece_of
from farflung.coded.codes import CODES
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
from farflung.coded.sending import heard, sent
from farflung.spec import build
from farflung.tasks import Pending, done
from farflung.types import Cost, Payload, Runtime, Tag

__all__ = ["Device"]

COORDINATOR = 0
_COMMANDS: tuple[type[Command], ...] = (Welcome, Meet, Rows, Columns, Drop, Probe)
_NO_BLOCK = Payload(())
"""The answer to who asks for something that is not there."""


class Device:
    """One device's part of a run, for as long as it hears of a coordinator.

    Args:
      runtime: the world; its rank is above 0.
      holding: its own data, and the blocks that it makes.
      admit: lets another device in, where that has to be asked for; see :meth:`farflung.runtime.WallRuntime.admit`.
      opened: done when all that were let in so far may come.
      patience_s: how long the coordinator may be silent, in seconds.
      fetch_s: how long another device may take to give a few rows, in seconds.
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
    ) -> None:
        self.refused = 0
        """Messages that were not of their form, or spoke of what there is not."""
        self.rounds = 0
        """Rounds of which it has answered something."""
        self._runtime, self._comm, self._holding = runtime, runtime.comm, holding
        self._admit, self._opened = admit, opened
        self._met: dict[int, Pending[None]] = {}
        self._patience_s = patience_s
        self._fetcher = Fetcher(runtime, holding, self._meeting, fetch_s)
        self._code, self._seed = "", 0

    async def run(self) -> str:
        """Takes part until the coordinator ends it.

        Returns:
          Why it ends; empty: training is over.

        Raises:
          PeerLost: the coordinator is gone.
          DeadlinePassed: it is silent.
        """
        for service in (self._obey(), self._serve()):
            self._runtime.launch(service)
        brought = self._holding.data
        rows, features = (0, 0) if brought is None else brought.shape
        labels = torch.empty(0, dtype=torch.float64) if self._holding.labels is None else self._holding.labels
        held = self._holding
        self._report(Hello(held.partition, held.raw, rows, features, held.coded, held.run, labels))
        coming = _Coming(self._heard())
        while True:
            task, coming = await coming.message(), _Coming(self._heard())
            if isinstance(task, End):
                return task.reason
            try:
                if task is None:
                    raise Malformed
                await self._multiply(task, coming)
            except (Malformed, RuntimeError):  # torch's, of an operand of other sizes
                self.refused += 1

    def leave(self) -> None:
        """Tells the coordinator that this device would like to go; :meth:`run` ends once it may."""
        self._report(Leaving())

    # --- products ---------------------------------------------------------------------------------------------------

    def _heard(self) -> Pending[Payload]:
        return self._runtime.launch(heard(self._comm, COORDINATOR, tags.OPERAND, self._patience_s))

    async def _multiply(self, task: Multiply, coming: _Coming) -> None:
        """Answers a round piece by piece, until the coordinator has what it needs.

        Each piece of a block is a piece of the whole, so that what a slow device has done counts. Devices begin with
        different ones.
        """
        blocks = self._holding.answering(task)
        if not blocks or task.pieces < 1:
            return
        self.rounds += 1
        await self._runtime.compute(Cost("forward", 0), lambda: None)
        for place in range(task.pieces):
            piece = (task.first + place) % task.pieces
            begin, end = piece_of(task.length, task.pieces, piece)
            for number, block in blocks.items():
                if coming.ends(task.round):
                    return
                product = await self._runtime.compute(
                    Cost("score", block.samples(begin, end, task)), partial(block.multiply, begin, end, task)
                )
                header = torch.tensor([number, piece])
                self._send(Payload((header, product)), tags.answers(task.round))

    # --- commands ---------------------------------------------------------------------------------------------------

    async def _obey(self) -> None:
        while True:
            message = await self._next(self._comm.recv(COORDINATOR, tags.COMMAND, deadline_s=math.inf))
            if isinstance(message, Welcome):
                self._holding.settle(message.run, message.raw)
                self._code, self._seed = message.code, message.seed
            elif isinstance(message, Meet):
                self._admit(message.rank).on_done(partial(_pass_on, self._meeting(message.rank)))
                if message.first:
                    self._runtime.launch(self._says_ready(message.rank))
            elif isinstance(message, Rows):
                self._runtime.launch(self._build(message.block, self._rows(message)))
            elif isinstance(message, Columns):
                self._runtime.launch(self._build(message.block, self._fetcher.columns(message)))
            elif isinstance(message, Drop):
                for block in message.blocks:
                    self._holding.drop(block)
            elif isinstance(message, Probe):
                self._report(Probe(message.round))

    async def _says_ready(self, rank: int) -> None:
        await self._opened()
        self._report(Ready(rank))

    async def _next(self, heard: Pending[Payload]) -> Message | None:
        """A command; ``None`` for what is none."""
        try:
            return unpacked(await heard, _COMMANDS)
        except Malformed:
            self.refused += 1
            return None

    async def _serve(self) -> None:
        """Gives other devices what they ask for."""
        while True:
            rank, payload = await self._comm.recv_any(tags.ASK, deadline_s=math.inf)
            try:
                request = unpacked(payload, (Fetch,))
                assert isinstance(request, Fetch)
            except Malformed:
                self.refused += 1
                continue
            try:
                given = Payload((self._holding.give(request),))
            except Malformed:
                self.refused += 1
                given = _NO_BLOCK
            self._comm.send(given, rank, tags.reply(request.reply))

    async def _build(self, block: int, making: Coroutine[Pending[Any], None, None]) -> None:
        try:
            await making
        except SourceLost as error:
            self._report(Failed(block, error.rank, error.detail))
        except (Malformed, RuntimeError, ValueError, IndexError):
            self.refused += 1
            self._report(Failed(block, self._comm.rank, "the order could not be carried out"))
        else:
            self._report(Built(block))

    async def _rows(self, order: Rows) -> None:
        sources = order.sources
        if order.index >= 0:
            weights = build("code", self._code, CODES).row(order.index, len(order.raw), self._seed)
            sources = tuple(
                Source(raw.rank, raw.block, float(weight))
                for raw, weight in zip(order.raw, weights, strict=True)
                if weight
            )
        await self._fetcher.rows(order, sources)

    def _meeting(self, rank: int) -> Pending[None]:
        return self._met.setdefault(rank, Pending())

    def _report(self, report: Report) -> None:
        self._send(packed(report), tags.REPORT)

    def _send(self, payload: Payload, tag: Tag) -> None:
        self._runtime.launch(sent(self._comm, payload, COORDINATOR, tag))


def _pass_on(to: Pending[None], ended: Pending[None]) -> None:
    if ended.error is None:
        to.set(None)
    else:
        to.fail(ended.error)


class _Coming:
    """The task that follows."""

    def __init__(self, heard: Pending[Payload]) -> None:
        self._heard = heard
        self._read: Multiply | End | None = None

    async def message(self) -> Multiply | End | None:
        """It, once it has come; ``None``: it is none."""
        await self._heard
        return self._message()

    def ends(self, round: int) -> bool:
        """Whether it has come, and an earlier one need not be carried on."""
        if not self._heard.done:
            return False
        if self._heard.error is not None:
            return True
        message = self._message()
        return isinstance(message, End) or (message is not None and message.since > round)

    def _message(self) -> Multiply | End | None:
        if self._read is None:
            try:
                message = unpacked(self._heard.result(), (Multiply, End))
            except Malformed:
                return None
            assert isinstance(message, (Multiply, End))
            self._read = message
        return self._read
