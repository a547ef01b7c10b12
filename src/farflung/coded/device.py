"""Device of coded training: brings data or room, builds blocks, serves rows, and multiplies its blocks."""

from __future__ import annotations

import itertools
import math
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import torch
from torch import Tensor

from farflung.coded import messages
from farflung.coded.blocks import (
    ColumnBlock,
    Draft,
    Holding,
    RowBlock,
    Term,
    fit,
    piece_of,
    rows_at_once,
    widest,
)
from farflung.coded.messages import (
    Built,
    Cancel,
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
    Multiply,
    Part,
    Probe,
    Ready,
    Report,
    Rows,
    Source,
    Welcome,
    packed,
    sent,
    unpacked,
)
from farflung.comm.failure_detector import Progress
from farflung.comm.mailbox import QUESTIONS
from farflung.errors import ConfigError, FarflungError, PeerLost
from farflung.tasks import Pending, done
from farflung.types import Cost, Payload, Runtime, Tag

__all__ = ["Device", "Queue"]

_COORDINATOR = 0
_COMMANDS: tuple[type[Command], ...] = (Welcome, Meet, Lost, Rows, Columns, Drop, Probe)
_WORK: tuple[type[Multiply | End], ...] = (Multiply, End)
_REQUESTS: tuple[type[Fetch | Cancel], ...] = (Fetch, Cancel)
_MAKERS = 2
"""Maximum number of blocks built at a time, and of drafts kept; each takes memory."""
_MOST_ASKED = 64
"""Maximum number of waiting requests of one device; further ones are refused."""
_NO_BLOCK = Payload(())
"""Answer to a request for an unknown block."""
_WINDOW = 4
"""Maximum number of requests in flight."""

T = TypeVar("T")


class Queue(Generic[T]):
    """Queue from one thread to several coroutines of another.

    Each side uses only single operations of the queue, and neither iterates over it.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._wait: Pending[None] | None = None

    def put(self, item: T) -> None:
        """Adds an item and wakes the waiting coroutines."""
        self._items.append(item)
        if self._wait is not None:
            self._wait.set(None)

    async def next(self) -> T:
        """Removes and returns the first item; waits if there is none."""
        while not self._items:
            if self._wait is None or self._wait.done:
                self._wait = Pending()
            if self._items:
                break
            await self._wait
        return self._items.popleft()


# --- making blocks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Share:
    """Some rows of one source.

    Args:
      source: Term to which the rows belong.
      request: Request for the source.
      target: Part of the new block to which the rows are added.
      max_rows: Maximum number of rows of the answer; those beyond the target sum to zero.
      missing_terms: Terms that the target still lacks.
    """

    source: Source
    request: Fetch
    into: Tensor
    most: int
    missing: set[Term]

    def add(self, given: Tensor) -> None:
        """Adds weighted rows to the target; smaller ones are padded with zeros."""
        width = self.into.shape[1]
        if given.dim() != 2 or given.shape[0] > self.most or given.shape[1] > width:
            raise Malformed(f"rows of {list(given.shape)} where {[self.most, width]} were due")
        given = given[: len(self.into)]
        self.into[: given.shape[0], : given.shape[1]].add_(given, alpha=self.source.weight)
        self.missing.discard(_term(self.source))


def _term(source: Source) -> Term:
    return source.block, source.weight


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request without an answer yet.

    Args:
      source_rows: Requested rows.
      number: Number of the answer.
      answer: Answer once it arrives.
      progress: Progress of the source.
    """

    share: _Share
    number: int
    answer: Pending[Payload]
    progress: Progress


def _shapes(order: Rows | Columns) -> dict[int, tuple[int, int]]:
    """Returns the shape of each part of a block by partition; a block of rows has a single part, -1.

    Raises:
      MalformedMessage: the order describes no valid block.
    """
    if isinstance(order, Rows):
        if min(order.rows, order.features) < 1:
            raise Malformed("an order of no block")
        return {-1: (order.rows, order.features)}
    features, rows = order.bounds[-1] if order.bounds else 0, [part.rows for part in order.parts]
    if not fit(order.weights, order.bounds, features) or features < 1 or min(rows, default=0) < 1:
        raise Malformed("an order of no block")
    width = widest(order.weights, order.bounds)  # 0 if there are more column blocks than columns
    return {part.partition: (width, part.rows) for part in order.parts}


def _drafted(order: Rows | Columns, earlier: Draft | None) -> Draft:
    """Builds a draft of zeros, with the parts of an earlier draft that have the same shape."""
    if earlier is None:
        earlier = Draft(RowBlock(0, {}))
    parts, sums = {}, earlier.sums
    for partition, shape in _shapes(order).items():
        data = earlier.block.parts.get(partition)
        if data is None or data.shape != shape:
            data = torch.zeros(shape, dtype=torch.float64)
            sums = {place: entry for place, entry in sums.items() if place[0] != partition}
        parts[partition] = data
    if isinstance(order, Rows):
        return Draft(RowBlock(order.features, parts), sums, earlier.fetched_nbytes)
    return Draft(ColumnBlock(order.bounds[-1], parts), sums, earlier.fetched_nbytes)


def _shares(order: Rows | Columns, draft: Draft) -> Iterator[_Share]:
    """Yields the rows that a draft lacks."""
    if isinstance(order, Rows):
        parts, width = [Part(-1, order.rows, False, order.sources)], order.features
    else:  # summed blocks of columns may be wider than their sum
        parts, width = [*order.parts], max(end - begin for begin, end in itertools.pairwise(order.bounds))
    step = rows_at_once(width)
    for part in parts:
        terms = frozenset(map(_term, part.sources))
        for begin in range(0, part.rows, step):
            end = min(part.rows, begin + step)
            target = draft.block.stretch(part.partition, begin, end)
            missing = draft.missing(part.partition, begin, terms, target)
            for source in [source for source in part.sources if _term(source) in missing]:
                request = Fetch(0, source.block, begin, end, part.partition)
                if isinstance(order, Columns) and part.raw:
                    request = replace(request, partition=-1, weights=order.weights, bounds=order.bounds)
                yield _Share(source, request, target, end - begin if part.partition < 0 else width, missing)


# --- the device -------------------------------------------------------------------------------------------------------


class Device:
    """One device's side of a run, for as long as its coordinator is connected.

    Args:
      runtime: Runtime of the device; its rank is above 0.
      store: Own data, and the blocks that the device builds.
      admit: Admits another device, if the runtime needs that; see :func:`farflung.coded.meeting.admit_device`.
      fetch_s: Time for which a source of rows may be silent, in seconds.
      room_nbytes: Maximum size of all blocks, including own data; by default half of the machine's memory.
    """

    def __init__(
        self,
        runtime: Runtime,
        holding: Holding,
        *,
        admit: Callable[[int, str | None], Pending[None]] = lambda rank, peer: done(None),
        fetch_s: float = 30.0,
        room_nbytes: int | None = None,
    ) -> None:
        self.refused = 0
        """Number of messages that were malformed, or about an unknown block."""
        self.rounds = 0
        """Number of rounds that were answered at least in part."""
        self._runtime, self._comm, self._holding = runtime, runtime.comm, holding
        self._admit = admit
        self._met: dict[int, Pending[None]] = {}
        """Completion of the connection to each rank."""
        self._watches = False
        self._asked: dict[int, deque[Fetch]] = {}
        """Waiting requests of each device that is being served."""
        if room_nbytes is None:
            room_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        self._fetch_s, self._room_nbytes = fetch_s, room_nbytes
        self._requests = self._making_nbytes = 0
        self._open: dict[int, _Asked] = {}
        self._work, self._orders = Queue[Multiply | End | FarflungError](), Queue[Rows | Columns]()
        self._since = 0.0
        """First round that is not over, by the last task."""
        self._greeted = self._leaves = self._stopped = False

    @property
    def rank(self) -> int:
        """Rank of the device in the run."""
        return self._comm.rank

    @property
    def sent(self) -> dict[str, int]:
        """Number of sent payload bytes, by kind of message."""
        return {kind: sum(to) for kind, to in self._comm.sent.to_json().items()}

    async def run(self) -> str:
        """Takes part until the coordinator ends it.

        Returns:
          Reason for the end; empty if training is over.

        Raises:
          PeerLost: the coordinator is gone.
          DeadlinePassed: the coordinator is silent.
        """
        for service in (self._hear(), self._obey(), self._give(), *(self._make() for _ in range(_MAKERS))):
            self._runtime.launch(service)
        store = self._holding
        rows, features = (0, 0) if store.data is None else store.data.shape
        labels = torch.empty(0, dtype=torch.float64) if store.labels is None else store.labels
        self._report(Hello(store.partition, rows, features, store.coded, store.run, labels))
        self._greeted = True
        if self._leaves:
            self._report(Leaving())
        while True:
            task = await self._work.next()
            if isinstance(task, End):
                await self._runtime.launch(self._stop())
                return task.reason
            if isinstance(task, FarflungError):
                raise task
            try:
                await self._multiply(task)
            except (Malformed, RuntimeError):  # from torch, for an operand of another size
                self.refused += 1

    def leave(self) -> None:
        """Asks the coordinator for release; :meth:`run` returns once it is granted."""
        self._leaves = True
        if self._greeted:
            self._report(Leaving())

    # --- products ---------------------------------------------------------------------------------------------------

    async def _hear(self) -> None:
        try:
            while True:
                message = self._comm.recv(_COORDINATOR, messages.OPERAND)
                try:
                    task = unpacked(await message, _WORK)
                except Malformed:
                    self.refused += 1
                    continue
                self._since = task.since if isinstance(task, Multiply) else math.inf
                self._work.put(task)
        except FarflungError as error:
            self._since = math.inf
            self._work.put(error)

    async def _multiply(self, task: Multiply) -> None:
        """Answers a round piece by piece, until it is over.

        The pieces of a block count one by one, so partial answers of a slow device are used. Each device begins
        with another piece.
        """
        blocks = {} if self._since > task.round else self._holding.answering(task)
        if not blocks:
            return
        self.rounds += 1
        await self._runtime.compute(Cost("forward", 0), lambda: None)
        for place in range(task.pieces):
            piece = (task.first + place) % task.pieces
            begin, end = piece_of(task.length, task.pieces, piece)
            for number, block in blocks.items():
                if self._since > task.round:
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
            except Malformed:
                self.refused += 1

    def _carry_out(self, message: Command) -> None:
        if isinstance(message, Welcome):
            self._holding.settle(message.run, message.raw)
        elif isinstance(message, Meet):
            if not 0 < message.rank < self._comm.size or message.rank == self._comm.rank:
                raise Malformed("a rank out of range")
            if self._meeting(message.rank).error is not None:  # an earlier device had this rank
                del self._met[message.rank]
            self._meeting(message.rank).follow(self._admit(message.rank, message.peer))
            if message.first:
                self._report(Ready(message.number))
        elif isinstance(message, Lost):
            self._meeting(message.rank).fail(PeerLost(message.rank, "it is gone"))
        elif isinstance(message, (Rows, Columns)):
            self._orders.put(message)
        elif isinstance(message, Drop):
            for block in message.blocks:
                self._holding.drop(block)
        elif isinstance(message, Probe):
            self._report(Probe(self._comm.moved_nbytes()))

    # --- blocks -----------------------------------------------------------------------------------------------------

    async def _make(self) -> None:
        while True:
            order = await self._orders.next()
            try:
                fetched_nbytes = await self._made(order)
            except PeerLost as error:
                draft = self._holding.drafts.get(order.block)
                detail = "".join(sign if sign.isprintable() else " " for sign in error.detail[:200])
                fetched_nbytes = 0 if draft is None else draft.fetched_nbytes
                self._report(Failed(order.block, error.rank, detail, fetched_nbytes))
            except (ConfigError, RuntimeError, ValueError):
                self.refused += 1
                self._report(Failed(order.block, self._comm.rank, "the order could not be carried out"))
            else:
                parts = order.parts if isinstance(order, Columns) else ()
                partitions = tuple(part.partition for part in parts)
                self._report(Built(order.block, partitions, fetched_nbytes))

    async def _made(self, order: Rows | Columns) -> int:
        """Builds a block, or adds parts to a block of columns.

        On failure, received rows are kept, and the next order of the block requests only the others.

        Returns:
          Number of bytes that other devices have sent for it.

        Raises:
          MalformedMessage: the order describes no valid block, or there is no room for it.
          PeerLost: a source has gone, or sent an invalid answer.
        """
        nbytes = 8 * sum(height * width for height, width in _shapes(order).values())
        if order.block in (-1, self._holding.raw):
            raise Malformed("an order of a block that is there")
        drafts = self._holding.drafts
        previous = drafts.pop(order.block, None)
        if self._holding.nbytes + self._making_nbytes + nbytes > self._room_nbytes:
            drafts.clear()
        if self._holding.nbytes + self._making_nbytes + nbytes > self._room_nbytes:
            raise Malformed(f"no room for {nbytes} bytes more")
        self._making_nbytes += nbytes
        try:
            draft = _drafted(order, previous)
            try:
                await self._gather(order, draft)
            except PeerLost:
                drafts[order.block] = draft
                while len(drafts) > _MAKERS:
                    del drafts[next(iter(drafts))]
                raise
            self._holding.keep(order.block, draft.block)
        finally:
            self._making_nbytes -= nbytes
        return draft.fetched_nbytes

    async def _gather(self, order: Rows | Columns, draft: Draft) -> None:
        fetches: deque[_Asked] = deque()
        try:
            for source_rows in _shares(order, draft):
                if source_rows.source.rank == self._comm.rank:
                    source_rows.add(self._holding.give(source_rows.request))
                    continue
                if len(fetches) == _WINDOW:
                    await self._land(fetches, draft)
                fetches.append(await self._ask(source_rows))
            while fetches:
                await self._land(fetches, draft)
        except PeerLost:
            for fetch in fetches:
                if fetch.answer.done and fetch.answer.error is None:
                    with suppress(Malformed):
                        draft.fetched_nbytes += self._add(fetch.share, fetch.answer.result())
            raise
        finally:
            self._withdraw(fetches)

    def _withdraw(self, flying: Iterable[_Asked]) -> None:
        """Drops pending requests, and cancels them at their sources."""
        requests: dict[int, list[int]] = {}
        for fetch in flying:
            if not fetch.answer.done or fetch.answer.error is not None:
                requests.setdefault(fetch.share.source.rank, []).append(fetch.number)
            self._forget(fetch.number)
        for rank, numbers in requests.items() if not self._stopped else ():
            self._runtime.launch(sent(self._comm, packed(Cancel(tuple(numbers))), rank, messages.ASK))

    async def _stop(self) -> None:
        """Stops all builds: their answers are dropped, and no further requests are sent."""
        self._stopped = True
        for number in tuple(self._open):
            self._forget(number)

    def _forget(self, number: int) -> None:
        self._open.pop(number, None)
        self._comm.forget(messages.reply(number).exchange)

    async def _ask(self, share: _Share) -> _Asked:
        rank = share.source.rank
        meeting, timeout = self._meeting(rank), self._runtime.sleep_until(self._runtime.now() + self._fetch_s)
        if not meeting.done and await self._runtime.first_of(meeting, timeout):
            raise PeerLost(rank, f"not met within {self._fetch_s:g} s")
        if meeting.error is not None:
            raise PeerLost(rank, str(meeting.error))
        if self._stopped:
            raise PeerLost(rank, "this device has ended")
        self._requests += 1
        number = self._requests
        answer = self._comm.recv(rank, messages.reply(number), deadline_s=math.inf)
        progress = Progress(self._runtime.now(), self._comm.moved_nbytes(rank))
        fetch = self._open[number] = _Asked(share, number, answer, progress)
        if not self._watches:
            self._watches = True
            self._runtime.launch(self._watch())
        self._comm.send(packed(replace(share.request, reply=number)), rank, messages.ASK)
        return fetch

    async def _watch(self) -> None:
        """Fails requests whose source is silent, with no traffic in either direction."""
        while self._open:
            await self._runtime.sleep_until(self._runtime.now() + self._fetch_s / QUESTIONS)
            time_s = self._runtime.now()
            for fetch in tuple(self._open.values()):
                rank = fetch.share.source.rank
                fetch.progress.update(0, self._comm.moved_nbytes(rank), time_s, self._fetch_s)
                if time_s >= fetch.progress.last_s + self._fetch_s:
                    fetch.answer.fail(PeerLost(rank, f"silent for {self._fetch_s:g} s"))
        self._watches = False

    async def _land(self, flying: deque[_Asked], draft: Draft) -> None:
        """Waits for the first answer, and adds its rows."""
        fetch = flying[0]
        try:
            draft.fetched_nbytes += self._add(fetch.share, await fetch.answer)
        except (FarflungError, Malformed) as error:
            raise PeerLost(fetch.share.source.rank, str(error)) from None
        finally:
            self._forget(fetch.number)
        flying.popleft()

    def _add(self, share: _Share, answer: Payload) -> int:
        """Adds the rows of an answer, and returns their size in bytes.

        Raises:
          MalformedMessage: the answer has other rows, or none.
        """
        tensors = list(answer.tensors())
        if len(tensors) != 1 or tensors[0].dtype != torch.float64:
            raise Malformed("it has no such block")
        if not bool(torch.isfinite(tensors[0]).all()):
            raise Malformed("numbers that are not finite")
        share.add(tensors[0])
        return tensors[0].nbytes

    # --- rows for other devices ------------------------------------------------------------------------------------

    async def _give(self) -> None:
        """Receives requests of other devices, and serves each device one request at a time."""
        while True:
            rank, payload = await self._comm.recv_any(messages.ASK, deadline_s=math.inf)
            try:
                request = unpacked(payload, _REQUESTS)
                if isinstance(request, Cancel):
                    waiting = self._asked.get(rank, deque())
                    for fetch in [fetch for fetch in waiting if fetch.reply in request.replies]:
                        waiting.remove(fetch)
                    continue
                if request.reply < 0 or len(self._asked.get(rank, ())) == _MOST_ASKED:
                    raise Malformed("a request that cannot be answered")
            except Malformed:
                self.refused += 1
                continue
            if rank in self._asked:
                self._asked[rank].append(request)
            else:
                self._asked[rank] = deque([request])
                self._runtime.launch(self._answer(rank))

    async def _answer(self, rank: int) -> None:
        requests = self._asked[rank]
        try:
            while requests:
                request, answer = requests.popleft(), _NO_BLOCK
                if request.block in self._holding.blocks:  # the block may have been dropped since the order
                    try:
                        answer = Payload((self._holding.give(request),))
                    except Malformed:
                        self.refused += 1
                await self._comm.send(answer, rank, messages.reply(request.reply))
        except FarflungError:  # the requesting device is gone
            return
        finally:
            del self._asked[rank]

    # --- messages ---------------------------------------------------------------------------------------------------

    def _meeting(self, rank: int) -> Pending[None]:
        return self._met.setdefault(rank, Pending())

    def _report(self, report: Report) -> None:
        self._send(packed(report), messages.REPORT)

    def _send(self, payload: Payload, tag: Tag) -> None:
        self._runtime.launch(sent(self._comm, payload, _COORDINATOR, tag))
