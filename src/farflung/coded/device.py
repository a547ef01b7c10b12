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
    BlockStore,
    ColumnBlock,
    Draft,
    RowBlock,
    Term,
    are_bounds_valid,
    compute_max_width,
    compute_piece_bounds,
    count_chunk_rows,
)
from farflung.coded.messages import (
    BlockPart,
    BlockSource,
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
    MalformedMessage,
    Meet,
    Multiply,
    Probe,
    Ready,
    Report,
    Rows,
    Welcome,
    decode_message,
    encode_message,
    send_message,
)
from farflung.comm.failure_detector import ProgressTracker
from farflung.comm.mailbox import PROBES_PER_DEADLINE
from farflung.errors import ConfigError, FarflungError, PeerLost
from farflung.tasks import Pending, create_completed
from farflung.types import Cost, Payload, Runtime, Tag

__all__ = ["Device", "Queue"]

_COORDINATOR = 0
_COMMANDS: tuple[type[Command], ...] = (Welcome, Meet, Lost, Rows, Columns, Drop, Probe)
_TASKS: tuple[type[Multiply | End], ...] = (Multiply, End)
_REQUESTS: tuple[type[Fetch | Cancel], ...] = (Fetch, Cancel)
_MAX_BUILDS = 2
"""Maximum number of blocks built at a time, and of drafts kept; each takes memory."""
_MAX_REQUESTS = 64
"""Maximum number of waiting requests of one device; further ones are refused."""
_EMPTY_ANSWER = Payload(())
"""Answer to a request for an unknown block."""
_FETCH_WINDOW = 4
"""Maximum number of requests in flight."""

T = TypeVar("T")


class Queue(Generic[T]):
    """Queue from one thread to several coroutines of another.

    Each side uses only single operations of the queue, and neither iterates over it.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._waiter: Pending[None] | None = None

    def put(self, item: T) -> None:
        """Adds an item and wakes the waiting coroutines."""
        self._items.append(item)
        if self._waiter is not None:
            self._waiter.set_result(None)

    async def get(self) -> T:
        """Removes and returns the first item; waits if there is none."""
        while not self._items:
            if self._waiter is None or self._waiter.is_done:
                self._waiter = Pending()
            if self._items:
                break
            await self._waiter
        return self._items.popleft()


# --- making blocks ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _SourceRows:
    """Some rows of one source.

    Args:
      source: Term to which the rows belong.
      request: Request for the source.
      target: Part of the new block to which the rows are added.
      max_rows: Maximum number of rows of the answer; those beyond the target sum to zero.
      missing_terms: Terms that the target still lacks.
    """

    source: BlockSource
    request: Fetch
    target: Tensor
    max_rows: int
    missing_terms: set[Term]

    def add(self, rows: Tensor) -> None:
        """Adds weighted rows to the target; smaller ones are padded with zeros."""
        width = self.target.shape[1]
        if rows.dim() != 2 or rows.shape[0] > self.max_rows or rows.shape[1] > width:
            raise MalformedMessage(f"rows of {list(rows.shape)} where {[self.max_rows, width]} were due")
        rows = rows[: len(self.target)]
        self.target[: rows.shape[0], : rows.shape[1]].add_(rows, alpha=self.source.weight)
        self.missing_terms.discard(_to_term(self.source))


def _to_term(source: BlockSource) -> Term:
    return source.block, source.weight


@dataclass(frozen=True, slots=True)
class _PendingFetch:
    """A request without an answer yet.

    Args:
      source_rows: Requested rows.
      number: Number of the answer.
      answer: Answer once it arrives.
      progress: Progress of the source.
    """

    source_rows: _SourceRows
    number: int
    answer: Pending[Payload]
    progress: ProgressTracker


def _compute_shapes(order: Rows | Columns) -> dict[int, tuple[int, int]]:
    """Returns the shape of each part of a block by partition; a block of rows has a single part, -1.

    Raises:
      MalformedMessage: the order describes no valid block.
    """
    if isinstance(order, Rows):
        if min(order.rows, order.features) < 1:
            raise MalformedMessage("an order of no block")
        return {-1: (order.rows, order.features)}
    features, rows = order.bounds[-1] if order.bounds else 0, [part.rows for part in order.parts]
    if (
        not are_bounds_valid(order.weights, order.bounds, features)
        or features < 1
        or min(rows, default=0) < 1
    ):
        raise MalformedMessage("an order of no block")
    width = compute_max_width(order.weights, order.bounds)  # 0 if there are more column blocks than columns
    return {part.partition: (width, part.rows) for part in order.parts}


def _build_draft(order: Rows | Columns, previous: Draft | None) -> Draft:
    """Builds a draft of zeros, with the parts of an earlier draft that have the same shape."""
    if previous is None:
        previous = Draft(RowBlock(0, {}))
    parts, sums = {}, previous.sums
    for partition, shape in _compute_shapes(order).items():
        data = previous.block.parts.get(partition)
        if data is None or data.shape != shape:
            data = torch.zeros(shape, dtype=torch.float64)
            sums = {place: entry for place, entry in sums.items() if place[0] != partition}
        parts[partition] = data
    if isinstance(order, Rows):
        return Draft(RowBlock(order.features, parts), sums, previous.fetched_nbytes)
    return Draft(ColumnBlock(order.bounds[-1], parts), sums, previous.fetched_nbytes)


def _iter_source_rows(order: Rows | Columns, draft: Draft) -> Iterator[_SourceRows]:
    """Yields the rows that a draft lacks, with a request for each chunk and source."""
    if isinstance(order, Rows):
        parts, width = [BlockPart(-1, order.rows, False, order.sources)], order.features
    else:  # summed blocks of columns may be wider than their sum
        parts, width = [*order.parts], max(end - begin for begin, end in itertools.pairwise(order.bounds))
    step = count_chunk_rows(width)
    for part in parts:
        terms = frozenset(map(_to_term, part.sources))
        for begin in range(0, part.rows, step):
            end = min(part.rows, begin + step)
            target = draft.block.slice_rows(part.partition, begin, end)
            missing = draft.find_missing_terms(part.partition, begin, terms, target)
            for source in [source for source in part.sources if _to_term(source) in missing]:
                request = Fetch(0, source.block, begin, end, part.partition)
                if isinstance(order, Columns) and part.is_raw:
                    request = replace(request, partition=-1, weights=order.weights, bounds=order.bounds)
                yield _SourceRows(
                    source, request, target, end - begin if part.partition < 0 else width, missing
                )


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
        store: BlockStore,
        *,
        admit: Callable[[int, str | None], Pending[None]] = lambda rank, peer: create_completed(None),
        fetch_s: float = 30.0,
        room_nbytes: int | None = None,
    ) -> None:
        self.num_refused = 0
        """Number of messages that were malformed, or about an unknown block."""
        self.num_rounds = 0
        """Number of rounds that were answered at least in part."""
        self._runtime, self._comm, self._store = runtime, runtime.comm, store
        self._admit = admit
        self._meetings: dict[int, Pending[None]] = {}
        """Completion of the connection to each rank."""
        self._is_watching = False
        self._request_queues: dict[int, deque[Fetch]] = {}
        """Waiting requests of each device that is being served."""
        if room_nbytes is None:
            room_nbytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
        self._fetch_s, self._room_nbytes = fetch_s, room_nbytes
        self._num_requests = self._building_nbytes = 0
        self._pending_fetches: dict[int, _PendingFetch] = {}
        self._tasks, self._orders = Queue[Multiply | End | FarflungError](), Queue[Rows | Columns]()
        self._first_open_round = 0.0
        """First round that is not over, by the last task."""
        self._has_greeted = self._is_leaving = self._is_stopped = False

    @property
    def rank(self) -> int:
        """Rank of the device in the run."""
        return self._comm.rank

    @property
    def sent_nbytes(self) -> dict[str, int]:
        """Number of sent payload bytes, by kind of message."""
        return {kind: sum(to) for kind, to in self._comm.sent_bytes.to_json().items()}

    async def run(self) -> str:
        """Takes part until the coordinator ends it.

        Returns:
          Reason for the end; empty if training is over.

        Raises:
          PeerLost: the coordinator is gone.
          DeadlinePassed: the coordinator is silent.
        """
        for service in (
            self._receive_tasks(),
            self._receive_commands(),
            self._receive_requests(),
            *(self._build_blocks() for _ in range(_MAX_BUILDS)),
        ):
            self._runtime.launch(service)
        store = self._store
        rows, features = (0, 0) if store.data is None else store.data.shape
        labels = torch.empty(0, dtype=torch.float64) if store.labels is None else store.labels
        self._report(Hello(store.partition, rows, features, store.coded_blocks, store.run, labels))
        self._has_greeted = True
        if self._is_leaving:
            self._report(Leaving())
        while True:
            task = await self._tasks.get()
            if isinstance(task, End):
                await self._runtime.launch(self._stop_builds())
                return task.reason
            if isinstance(task, FarflungError):
                raise task
            try:
                await self._multiply(task)
            except (MalformedMessage, RuntimeError):  # from torch, for an operand of another size
                self.num_refused += 1

    def leave(self) -> None:
        """Asks the coordinator for release; :meth:`run` returns once it is granted."""
        self._is_leaving = True
        if self._has_greeted:
            self._report(Leaving())

    # --- products ---------------------------------------------------------------------------------------------------

    async def _receive_tasks(self) -> None:
        try:
            while True:
                message = self._comm.recv(_COORDINATOR, messages.OPERAND)
                try:
                    task = decode_message(await message, _TASKS)
                except MalformedMessage:
                    self.num_refused += 1
                    continue
                self._first_open_round = task.since if isinstance(task, Multiply) else math.inf
                self._tasks.put(task)
        except FarflungError as error:
            self._first_open_round = math.inf
            self._tasks.put(error)

    async def _multiply(self, task: Multiply) -> None:
        """Answers a round piece by piece, until it is over.

        The pieces of a block count one by one, so partial answers of a slow device are used. Each device begins
        with another piece.
        """
        blocks = {} if self._first_open_round > task.round else self._store.select_blocks(task)
        if not blocks:
            return
        self.num_rounds += 1
        await self._runtime.compute(Cost("forward", 0), lambda: None)
        for place in range(task.pieces):
            piece = (task.first + place) % task.pieces
            begin, end = compute_piece_bounds(task.length, task.pieces, piece)
            for number, block in blocks.items():
                if self._first_open_round > task.round:
                    return
                product = await self._runtime.compute(
                    Cost("score", block.count_samples(begin, end, task)),
                    partial(block.multiply, begin, end, task),
                )
                header = torch.tensor([number, piece])
                self._send(Payload((header, product)), messages.build_answer_tag(task.round))

    # --- commands ---------------------------------------------------------------------------------------------------

    async def _receive_commands(self) -> None:
        while True:
            command = await self._comm.recv(_COORDINATOR, messages.COMMAND, deadline_s=math.inf)
            try:
                self._handle_command(decode_message(command, _COMMANDS))
            except MalformedMessage:
                self.num_refused += 1

    def _handle_command(self, message: Command) -> None:
        if isinstance(message, Welcome):
            self._store.bind_run(message.run, message.raw)
        elif isinstance(message, Meet):
            if not 0 < message.rank < self._comm.size or message.rank == self._comm.rank:
                raise MalformedMessage("a rank out of range")
            if self._get_meeting(message.rank).error is not None:  # an earlier device had this rank
                del self._meetings[message.rank]
            self._get_meeting(message.rank).follow(self._admit(message.rank, message.peer))
            if message.first:
                self._report(Ready(message.number))
        elif isinstance(message, Lost):
            self._get_meeting(message.rank).set_exception(PeerLost(message.rank, "it is gone"))
        elif isinstance(message, (Rows, Columns)):
            self._orders.put(message)
        elif isinstance(message, Drop):
            for block in message.blocks:
                self._store.drop_block(block)
        elif isinstance(message, Probe):
            self._report(Probe(self._comm.get_traffic_nbytes()))

    # --- blocks -----------------------------------------------------------------------------------------------------

    async def _build_blocks(self) -> None:
        while True:
            order = await self._orders.get()
            try:
                fetched_nbytes = await self._build_block(order)
            except PeerLost as error:
                draft = self._store.drafts.get(order.block)
                detail = "".join(sign if sign.isprintable() else " " for sign in error.detail[:200])
                fetched_nbytes = 0 if draft is None else draft.fetched_nbytes
                self._report(Failed(order.block, error.rank, detail, fetched_nbytes))
            except (ConfigError, RuntimeError, ValueError):
                self.num_refused += 1
                self._report(Failed(order.block, self._comm.rank, "the order could not be carried out"))
            else:
                parts = order.parts if isinstance(order, Columns) else ()
                partitions = tuple(part.partition for part in parts)
                self._report(Built(order.block, partitions, fetched_nbytes))

    async def _build_block(self, order: Rows | Columns) -> int:
        """Builds a block, or adds parts to a block of columns.

        On failure, received rows are kept, and the next order of the block requests only the others.

        Returns:
          Number of bytes that other devices have sent for it.

        Raises:
          MalformedMessage: the order describes no valid block, or there is no room for it.
          PeerLost: a source has gone, or sent an invalid answer.
        """
        nbytes = 8 * sum(height * width for height, width in _compute_shapes(order).values())
        if order.block in (-1, self._store.raw_number):
            raise MalformedMessage("an order of a block that is there")
        drafts = self._store.drafts
        previous = drafts.pop(order.block, None)
        if self._store.nbytes + self._building_nbytes + nbytes > self._room_nbytes:
            drafts.clear()
        if self._store.nbytes + self._building_nbytes + nbytes > self._room_nbytes:
            raise MalformedMessage(f"no room for {nbytes} bytes more")
        self._building_nbytes += nbytes
        try:
            draft = _build_draft(order, previous)
            try:
                await self._fetch_rows(order, draft)
            except PeerLost:
                drafts[order.block] = draft
                while len(drafts) > _MAX_BUILDS:
                    del drafts[next(iter(drafts))]
                raise
            self._store.store_block(order.block, draft.block)
        finally:
            self._building_nbytes -= nbytes
        return draft.fetched_nbytes

    async def _fetch_rows(self, order: Rows | Columns, draft: Draft) -> None:
        fetches: deque[_PendingFetch] = deque()
        try:
            for source_rows in _iter_source_rows(order, draft):
                if source_rows.source.rank == self._comm.rank:
                    source_rows.add(self._store.read_rows(source_rows.request))
                    continue
                if len(fetches) == _FETCH_WINDOW:
                    await self._finish_fetch(fetches, draft)
                fetches.append(await self._start_fetch(source_rows))
            while fetches:
                await self._finish_fetch(fetches, draft)
        except PeerLost:
            for fetch in fetches:
                if fetch.answer.is_done and fetch.answer.error is None:
                    with suppress(MalformedMessage):
                        draft.fetched_nbytes += self._add_rows(fetch.source_rows, fetch.answer.result())
            raise
        finally:
            self._cancel_fetches(fetches)

    def _cancel_fetches(self, fetches: Iterable[_PendingFetch]) -> None:
        """Drops pending requests, and cancels them at their sources."""
        requests: dict[int, list[int]] = {}
        for fetch in fetches:
            if not fetch.answer.is_done or fetch.answer.error is not None:
                requests.setdefault(fetch.source_rows.source.rank, []).append(fetch.number)
            self._forget_fetch(fetch.number)
        for rank, numbers in requests.items() if not self._is_stopped else ():
            self._runtime.launch(
                send_message(self._comm, encode_message(Cancel(tuple(numbers))), rank, messages.REQUEST)
            )

    async def _stop_builds(self) -> None:
        """Stops all builds: their answers are dropped, and no further requests are sent."""
        self._is_stopped = True
        for number in tuple(self._pending_fetches):
            self._forget_fetch(number)

    def _forget_fetch(self, number: int) -> None:
        self._pending_fetches.pop(number, None)
        self._comm.cancel_exchange(messages.build_reply_tag(number).exchange)

    async def _start_fetch(self, source_rows: _SourceRows) -> _PendingFetch:
        rank = source_rows.source.rank
        meeting = self._get_meeting(rank)
        timeout = self._runtime.sleep_until(self._runtime.read_clock() + self._fetch_s)
        if not meeting.is_done and await self._runtime.wait_any(meeting, timeout):
            raise PeerLost(rank, f"not met within {self._fetch_s:g} s")
        if meeting.error is not None:
            raise PeerLost(rank, str(meeting.error))
        if self._is_stopped:
            raise PeerLost(rank, "this device has ended")
        self._num_requests += 1
        number = self._num_requests
        answer = self._comm.recv(rank, messages.build_reply_tag(number), deadline_s=math.inf)
        progress = ProgressTracker(self._runtime.read_clock(), self._comm.get_traffic_nbytes(rank))
        fetch = self._pending_fetches[number] = _PendingFetch(source_rows, number, answer, progress)
        if not self._is_watching:
            self._is_watching = True
            self._runtime.launch(self._fail_silent_fetches())
        self._comm.send(encode_message(replace(source_rows.request, reply=number)), rank, messages.REQUEST)
        return fetch

    async def _fail_silent_fetches(self) -> None:
        """Fails fetches without traffic in either direction, until none is pending."""
        while self._pending_fetches:
            await self._runtime.sleep_until(self._runtime.read_clock() + self._fetch_s / PROBES_PER_DEADLINE)
            time_s = self._runtime.read_clock()
            for fetch in tuple(self._pending_fetches.values()):
                rank = fetch.source_rows.source.rank
                fetch.progress.update(0, self._comm.get_traffic_nbytes(rank), time_s, self._fetch_s)
                if time_s >= fetch.progress.last_s + self._fetch_s:
                    fetch.answer.set_exception(PeerLost(rank, f"silent for {self._fetch_s:g} s"))
        self._is_watching = False

    async def _finish_fetch(self, fetches: deque[_PendingFetch], draft: Draft) -> None:
        """Waits for the first answer, and adds its rows."""
        fetch = fetches[0]
        try:
            draft.fetched_nbytes += self._add_rows(fetch.source_rows, await fetch.answer)
        except (FarflungError, MalformedMessage) as error:
            raise PeerLost(fetch.source_rows.source.rank, str(error)) from None
        finally:
            self._forget_fetch(fetch.number)
        fetches.popleft()

    def _add_rows(self, source_rows: _SourceRows, answer: Payload) -> int:
        """Adds the rows of an answer, and returns their size in bytes.

        Raises:
          MalformedMessage: the answer has other rows, or none.
        """
        tensors = list(answer.iter_tensors())
        if len(tensors) != 1 or tensors[0].dtype != torch.float64:
            raise MalformedMessage("it has no such block")
        if not bool(torch.isfinite(tensors[0]).all()):
            raise MalformedMessage("numbers that are not finite")
        source_rows.add(tensors[0])
        return tensors[0].nbytes

    # --- rows for other devices ------------------------------------------------------------------------------------

    async def _receive_requests(self) -> None:
        """Receives requests of other devices, and serves each device one request at a time."""
        while True:
            rank, payload = await self._comm.recv_any(messages.REQUEST, deadline_s=math.inf)
            try:
                request = decode_message(payload, _REQUESTS)
                if isinstance(request, Cancel):
                    waiting = self._request_queues.get(rank, deque())
                    for fetch in [fetch for fetch in waiting if fetch.reply in request.replies]:
                        waiting.remove(fetch)
                    continue
                if request.reply < 0 or len(self._request_queues.get(rank, ())) == _MAX_REQUESTS:
                    raise MalformedMessage("a request that cannot be answered")
            except MalformedMessage:
                self.num_refused += 1
                continue
            if rank in self._request_queues:
                self._request_queues[rank].append(request)
            else:
                self._request_queues[rank] = deque([request])
                self._runtime.launch(self._serve_requests(rank))

    async def _serve_requests(self, rank: int) -> None:
        requests = self._request_queues[rank]
        try:
            while requests:
                request, answer = requests.popleft(), _EMPTY_ANSWER
                if request.block in self._store.blocks:  # the block may have been dropped since the order
                    try:
                        answer = Payload((self._store.read_rows(request),))
                    except MalformedMessage:
                        self.num_refused += 1
                await self._comm.send(answer, rank, messages.build_reply_tag(request.reply))
        except FarflungError:  # the requesting device is gone
            return
        finally:
            del self._request_queues[rank]

    # --- messages ---------------------------------------------------------------------------------------------------

    def _get_meeting(self, rank: int) -> Pending[None]:
        return self._meetings.setdefault(rank, Pending())

    def _report(self, report: Report) -> None:
        self._send(encode_message(report), messages.REPORT)

    def _send(self, payload: Payload, tag: Tag) -> None:
        self._runtime.launch(send_message(self._comm, payload, _COORDINATOR, tag))
