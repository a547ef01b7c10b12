"""Making of blocks: a device asks others for a few rows at a time, and adds them up."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from farflung.coded import messages
from farflung.coded.blocks import ColumnBlock, Holding, RowBlock, fit, rows_at_once, widest
from farflung.coded.messages import Columns, Fetch, Malformed, Rows, Source, packed
from farflung.errors import DeadlinePassed, FarflungError, RunLost
from farflung.tasks import Pending
from farflung.types import Payload, Runtime

__all__ = ["Fetcher", "SourceLost"]

_WINDOW = 4
"""Requests that are under way at a time."""


class SourceLost(RunLost):
    """A device did not give the rows that it was asked for.

    Args:
      rank: of the device.
      detail: what was seen.
    """

    def __init__(self, rank: int, detail: str) -> None:
        self.rank, self.detail = rank, detail
        super().__init__(f"rank {rank} did not give its share of a block: {detail}")


@dataclass(frozen=True, slots=True)
class _Share:
    """Some rows of one source.

    Args:
      source: holds them.
      request: for the source.
      take: adds the rows to the block that is being made, times their weight.
    """

    source: Source
    request: Fetch
    take: Callable[[Tensor], object]


class Fetcher:
    """Makes the blocks of one device.

    Args:
      runtime: of the device.
      holding: takes in the blocks that are made.
      met: done when another device can be asked.
      deadline_s: the time in which another device gives a few rows, in seconds.
      room_nbytes: the most bytes of all its blocks, those under way among them.
    """

    def __init__(
        self,
        runtime: Runtime,
        holding: Holding,
        met: Callable[[int], Pending[None]],
        deadline_s: float,
        room_nbytes: int,
    ) -> None:
        self._runtime, self._comm, self._holding, self._met = runtime, runtime.comm, holding, met
        self._deadline_s, self._room_nbytes = deadline_s, room_nbytes
        self._asked = self._making_nbytes = 0
        self._open: set[int] = set()
        """Numbers of requests whose answers are awaited."""
        self._stopped = False

    async def rows(self, order: Rows) -> int:
        """Makes a block of rows.

        Returns:
          The bytes that other devices gave for it.

        Raises:
          Malformed: there is no such block, or no room for it.
          SourceLost: a source has gone, or gave something else.
        """
        if min(order.rows, order.features) < 1 or order.block in (-1, self._holding.raw):
            raise Malformed("an order of no block")
        step = rows_at_once(order.features)

        def shares(block: Tensor) -> Iterator[_Share]:
            for begin in range(0, order.rows, step):
                end = min(order.rows, begin + step)
                for source in order.sources:
                    yield _Share(
                        source, Fetch(0, source.block, begin, end), _adding(block[begin:end], source.weight)
                    )

        with self._room(8 * order.rows * order.features):
            block = torch.zeros(order.rows, order.features, dtype=torch.float64)
            fetched_nbytes = await self._gather(shares(block))
            self._holding.blocks[order.block] = RowBlock(block)
        return fetched_nbytes

    async def columns(self, order: Columns) -> int:
        """Makes a block of columns, or adds parts to it.

        Returns:
          The bytes that other devices gave for it.

        Raises:
          Malformed: there is no such block, or no room for it.
          SourceLost: a source has gone, or gave something else.
        """
        features, rows = order.bounds[-1] if order.bounds else 0, [part.rows for part in order.parts]
        if not fit(order.weights, order.bounds, features) or features < 1 or min(rows, default=0) < 1:
            raise Malformed("an order of no block")
        if order.block in (-1, self._holding.raw):
            raise Malformed("an order of a block that is there")
        width = widest(order.weights, order.bounds)
        # Blocks of columns that are summed may be wider than their sum.
        most = max(end - begin for begin, end in itertools.pairwise(order.bounds))
        step = rows_at_once(most)

        def shares(made: dict[int, Tensor]) -> Iterator[_Share]:
            for part in order.parts:
                for begin in range(0, part.rows, step):
                    end = min(part.rows, begin + step)
                    for source in part.sources:
                        request = Fetch(0, source.block, begin, end, part.partition)
                        if part.raw:
                            request = replace(
                                request, partition=-1, weights=order.weights, bounds=order.bounds
                            )
                        into = made[part.partition][:, begin:end]
                        yield _Share(source, request, _adding(into, source.weight, most))

        with self._room(8 * width * sum(rows)):
            made = {
                part.partition: torch.zeros(width, part.rows, dtype=torch.float64) for part in order.parts
            }
            fetched_nbytes = await self._gather(shares(made))
            before = self._holding.blocks.get(order.block)
            parts = before.parts if isinstance(before, ColumnBlock) else {}
            self._holding.blocks[order.block] = ColumnBlock(features, {**parts, **made})
        return fetched_nbytes

    @contextmanager
    def _room(self, nbytes: int) -> Iterator[None]:
        """Takes room for a block that is being made.

        Raises:
          Malformed: there is not enough.
        """
        if self._holding.nbytes + self._making_nbytes + nbytes > self._room_nbytes:
            raise Malformed(f"no room for {nbytes} bytes more")
        self._making_nbytes += nbytes
        try:
            yield
        finally:
            self._making_nbytes -= nbytes

    async def _gather(self, shares: Iterator[_Share]) -> int:
        flying: deque[tuple[_Share, int, Pending[Payload]]] = deque()
        nbytes = 0
        try:
            for share in shares:
                if share.source.rank == self._comm.rank:
                    share.take(self._holding.give(share.request))
                    continue
                if len(flying) == _WINDOW:
                    nbytes += await self._land(*flying.popleft())
                flying.append(await self._ask(share))
            while flying:
                nbytes += await self._land(*flying.popleft())
        finally:
            for _, number, _ in flying:
                self._forget(number)
        return nbytes

    async def stop(self) -> None:
        """Ends the blocks that are being made: their answers are dropped, and no more requests are sent."""
        self._stopped = True
        for number in tuple(self._open):
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._open.discard(number)
        self._comm.forget(messages.reply(number).exchange)

    async def _ask(self, share: _Share) -> tuple[_Share, int, Pending[Payload]]:
        rank = share.source.rank
        met, passed = self._met(rank), self._runtime.sleep_until(self._runtime.now() + self._deadline_s)
        if not met.done and await self._runtime.first_of(met, passed):
            raise SourceLost(rank, f"not met within {self._deadline_s:g} s")
        if met.error is not None:
            raise SourceLost(rank, str(met.error))
        if self._stopped:
            raise SourceLost(rank, "this device has ended")
        self._asked += 1
        number = self._asked
        answer = self._comm.recv(rank, messages.reply(number), deadline_s=self._deadline_s)
        self._open.add(number)
        self._comm.send(packed(replace(share.request, reply=number)), rank, messages.ASK)
        return share, number, answer

    async def _land(self, share: _Share, number: int, answer: Pending[Payload]) -> int:
        try:
            given = list((await answer).tensors())
            if len(given) != 1 or given[0].dtype != torch.float64:
                raise Malformed("it has no such block")
            if not bool(torch.isfinite(given[0]).all()):
                raise Malformed("numbers that are not finite")
            share.take(given[0])
            return given[0].nbytes
        except DeadlinePassed:
            raise SourceLost(share.source.rank, f"silent for {self._deadline_s:g} s") from None
        except (FarflungError, Malformed) as error:
            raise SourceLost(share.source.rank, str(error)) from None
        finally:
            self._forget(number)


def _adding(into: Tensor, weight: float, most: int | None = None) -> Callable[[Tensor], object]:
    """Makes a function that adds rows to a part of a block; smaller ones count as if zeros followed.

    Args:
      into: the part.
      weight: a factor of the rows.
      most: the most rows that may come, where those beyond the part's add up to zeros.
    """
    room = len(into) if most is None else most

    def add(given: Tensor) -> None:
        if given.dim() != 2 or given.shape[0] > room or given.shape[1] > into.shape[1]:
            raise Malformed(f"rows of {list(given.shape)} where {[room, into.shape[1]]} were due")
        given = given[: len(into)]
        into[: given.shape[0], : given.shape[1]].add_(given, alpha=weight)

    return add
