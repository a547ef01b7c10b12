"""Catch-up of a joining replica, which follows a running run by the results of its exchanges.

Members make a snapshot at one step and keep later results. The joining replica requests pieces of both from all of
them, so the loss of one costs no repeated byte. It follows the run by these results, and asks to be admitted once it
has caught up.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from farflung.errors import ReplicaSuspended, StateOutdated
from farflung.membership.connections import build_payload
from farflung.membership.exchanges import LoggedExchange
from farflung.membership.giving import REQUESTS, ContentName
from farflung.tasks import Pending
from farflung.trees import unpack_tensors
from farflung.types import Runtime

__all__ = ["Follower"]

_PIECE_NBYTES, _MAX_PIECE_NBYTES = 1 << 14, 1 << 20
_QUEUE_S, _WAITED_FOR_S = 0.1, 1.0
"""Maximum queueing time of answers. It is short while others use the link, so that their messages come first (as in
LEDBAT, RFC 6817), and longer once they wait for the replica."""


class _Content:
    """Bytes that are being fetched.

    Args:
      nbytes: Number of bytes.
    """

    def __init__(self, nbytes: int) -> None:
        self.data = torch.empty(nbytes, dtype=torch.uint8)
        self.missing_nbytes = nbytes
        self.pending_ranges = [(0, nbytes)] if nbytes else []
        """Begin and end of each range that has not been requested."""

    def take_range(self, max_nbytes: int) -> tuple[int, int]:
        """Returns begin and size of the next range to request."""
        begin, end = self.pending_ranges.pop(0)
        if end - begin > max_nbytes:
            self.pending_ranges.insert(0, (begin + max_nbytes, end))
        return begin, min(max_nbytes, end - begin)

    def put_piece(self, begin: int, piece: Tensor) -> None:
        """Stores a piece."""
        self.data[begin : begin + len(piece)] = piece
        self.missing_nbytes -= len(piece)


@dataclass(eq=False)
class _SnapshotSource:
    """Offer of a member, and the state of requests to it."""

    step: int
    parts: Mapping[str, int]
    missing_numbers: frozenset[int]
    num_started: int
    results: set[int] = field(default_factory=set)
    """Numbers of the results that it holds."""
    fetched_numbers: list[int] = field(default_factory=list)
    """Numbers of fetched results that the member does not know of yet."""
    start_state: Mapping[str, Any] | None = None
    pending_requests: dict[tuple[ContentName, int, int], float] = field(default_factory=dict)
    """Time of each unanswered request, by name, begin and size: a retry may ask for another size at the same begin."""
    window_nbytes: int = 2 * _PIECE_NBYTES
    """Maximum number of requested bytes."""
    min_answer_s: float = math.inf
    """Shortest time of an answer."""

    @property
    def snapshot_key(self) -> tuple[int, tuple[str, ...]]:
        """Key of the offered snapshot, equal for members with equal offers."""
        return self.step, tuple(self.parts)

    @property
    def room_nbytes(self) -> int:
        """Number of bytes that may still be requested."""
        return self.window_nbytes - sum(nbytes for *_, nbytes in self.pending_requests)

    def record_answer(self, nbytes: int, seconds: float, queue_s: float) -> None:
        """Adapts the window to the time of an answer, which may include ``queue_s`` of queueing."""
        self.min_answer_s = min(self.min_answer_s, seconds)
        if seconds < self.min_answer_s + queue_s:
            self.window_nbytes = min(self.window_nbytes + nbytes, 16 * _MAX_PIECE_NBYTES)
        else:
            self.window_nbytes = max(_PIECE_NBYTES, self.window_nbytes * 3 // 4)


class Follower:
    """Client of a joining replica that fetches a snapshot, then later results, until the replica begins.

    It belongs to the thread that carries exchanges.

    Args:
      runtime: Runtime of the replica.
      request_snapshot: Callback that requests a snapshot from members.
      request_admission: Callback that asks members for admission.
      give_up: Callback that ends this replica because the others have already begun its first step.
      replace_changes: Callback that receives the changes of members, as JSON, from a member.
    """

    def __init__(
        self,
        runtime: Runtime,
        request_snapshot: Callable[[], None],
        request_admission: Callable[[], None],
        give_up: Callable[[], None],
        replace_changes: Callable[[Sequence[Any]], None],
    ) -> None:
        self._runtime, self._comm = runtime, runtime.comm
        self._request_snapshot = request_snapshot
        self._request_admission = request_admission
        self._give_up = give_up
        self._replace_changes = replace_changes
        self._parts: dict[str, _Content] = {}
        """Parts of snapshots, by digest."""
        self._view_number = 0
        self.is_waited_for = False
        """True if the replica is a member and the others wait for it."""
        self.is_too_far_behind = False
        """True if results arrive too fast for this replica, so that it receives the state after its admission."""
        self.received_nbytes = 0
        """Received bytes of snapshots and results."""
        self.request_number = 1
        """Number of the request for a snapshot."""
        self._end_error: BaseException | None = None
        self._restart_error: StateOutdated | None = None
        """Reason why the followed state is outdated, until another snapshot is received."""
        self._event = Pending[None]()
        self._reset()

    def _reset(self) -> None:
        self._sources: dict[int, _SnapshotSource] = {}
        self._chosen_source: _SnapshotSource | None = None
        self._contents: dict[int, _Content] = {}
        """Results that are being fetched, by number."""
        self._index: dict[int, tuple[int, int, int]] = {}
        """Exchange, part and last begun step of results that members hold, by number."""
        self._numbers: dict[tuple[int, int], int] = {}
        self.results: dict[int, tuple[Tensor, ...]] = {}
        """Fetched results, by number."""
        self.followed_exchanges: dict[int, LoggedExchange[Any]] = {}
        """Exchanges that have received their results, by number."""
        self._waiting_exchanges: dict[tuple[int, int], LoggedExchange[Any]] = {}
        """Exchanges that wait for their results, by exchange and part."""
        self._step: int | None = None
        """Step that the replica follows; ``None`` until it has taken the snapshot."""
        self._first_retained = 0
        """Smallest number of a result that a member may lack."""
        self._round_backlog, self._num_fetched = 0, 0
        """Number of missing results at the begin of the last round, and number of results fetched since."""
        self._has_asked = False

    # --- for the replica --------------------------------------------------------------------------------------------

    async def receive_snapshot(self) -> list[Tensor]:
        """Waits for a snapshot, and returns its parts."""
        self._restart_error = None
        while not self._is_complete():
            await self._wait_for_event()
        assert self._chosen_source is not None
        self._step = self._chosen_source.step
        return [self._parts[digest].data for digest in self._chosen_source.parts]

    async def wait_for_step(self, step: int) -> Mapping[str, Any] | None:
        """Waits until a step can be followed, or returns the start state if this replica begins at it."""
        if (error := self._find_error()) is not None:
            raise error
        self._step = step
        self._drop_results()
        while True:
            begins = next((s.start_state for s in self._sources.values() if s.start_state is not None), None)
            if begins is not None and step >= begins["step"]:
                if not self._is_missing_results(begins["started"], begins["log"]):
                    return begins
            elif begins is not None or any(begun >= step for _, _, begun in self._index.values()):
                return None
            elif not self._contents:
                self._request_admission_once()
            await self._wait_for_event()

    def follow_exchange(self, logged: LoggedExchange[Any]) -> None:
        """Gives an exchange its result once it has arrived."""
        if (error := self._find_error()) is not None:
            logged.result.set_exception(error)
            return
        self._waiting_exchanges[logged.exchange, logged.part] = logged
        self._deliver_results()

    def get_exchange(self, number: int) -> tuple[int, int]:
        """Returns exchange and part of a fetched result."""
        exchange, part, _ = self._index[number]
        return exchange, part

    def _find_error(self) -> BaseException | None:
        """Returns the error that prevents the replica from following, or ``None``."""
        error = self._end_error or self._restart_error
        if error is None and self._step is None:
            return ReplicaSuspended("this replica was suspended while it followed the run")
        return error

    def fail_waits(self, error: BaseException) -> None:
        """Fails all present and later waits with an error."""
        self._end_error = error
        self._fail(error)

    async def _wait_for_event(self) -> None:
        if (error := self._end_error or self._restart_error) is not None:
            raise error
        await self._event
        if (error := self._end_error or self._restart_error) is not None:
            raise error

    def _wake(self) -> None:
        event, self._event = self._event, Pending()
        event.set_result(None)

    def _fail(self, error: BaseException) -> None:
        waiting, self._waiting_exchanges = self._waiting_exchanges, {}
        for logged in waiting.values():
            logged.result.set_exception(error)
        self._wake()

    def _has_enough(self, source: _SnapshotSource) -> bool:
        """Returns True if a member has all missing parts of the snapshot and all missing results."""
        snapshot = self._chosen_source
        assert snapshot is not None
        if self._step is None:
            return source.snapshot_key == snapshot.snapshot_key
        missing = {
            *snapshot.missing_numbers,
            *range(snapshot.num_started + 1, source.num_started + 1),
        } - source.missing_numbers
        return all(n > source.num_started or n < self._first_retained or n in self.results for n in missing)

    def _is_complete(self) -> bool:
        return self._chosen_source is not None and not any(
            self._parts[digest].missing_nbytes for digest in self._chosen_source.parts
        )

    def _is_missing_results(self, last: int, log: Iterable[int]) -> bool:
        """Returns True if a result is missing that the snapshot lacks, up to ``last``, or that the log lists."""
        assert self._chosen_source is not None
        numbers = {
            *self._chosen_source.missing_numbers,
            *range(self._chosen_source.num_started + 1, last + 1),
            *log,
        }
        return any(number >= self._first_retained and number not in self.results for number in numbers)

    def _drop_results(self) -> None:
        """Drops results that all members have and this replica no longer needs."""
        assert self._step is not None
        for number, (_, _, begun) in list(self._index.items()):
            if number < self._first_retained and begun < self._step and number in self.results:
                del self.results[number], self._index[number]
                self.followed_exchanges.pop(number, None)

    def _request_admission_once(self) -> None:
        if not self._has_asked:
            self._has_asked = True
            self._request_admission()

    def _restart(self, reason: str) -> None:
        """Restarts with another snapshot; fetched parts of the snapshot are kept."""
        waiting = self._waiting_exchanges
        self._reset()
        self._waiting_exchanges = waiting
        self.request_number += 1
        self._restart_error = StateOutdated(reason)
        self._fail(self._restart_error)

    # --- what members tell ------------------------------------------------------------------------------------------

    def handle_news(self, rank: int, text: bytes) -> None:
        """Handles news of a member; raises ``ValueError``, ``KeyError`` or ``TypeError`` if it is malformed."""
        news = json.loads(text)
        if not isinstance(news, dict):
            raise TypeError("news is no object")
        if (offer := news.get("offer")) is not None and offer["view"] >= self._view_number:
            self._release(rank)
            parts = {str(digest): int(nbytes) for digest, nbytes in offer["parts"]}
            self._sources[rank] = _SnapshotSource(
                offer["step"], parts, frozenset(offer["needed"]), offer["started"]
            )
            self._choose_source()
        if news.get("late") and self._chosen_source is None:
            self._give_up()
        if (source := self._sources.get(rank)) is None:
            return
        if (result := news.get("result")) is not None:
            self._handle_result(source, *result)
        if (view := news.get("view")) is not None:
            self._handle_view(**view)
        if (begins := news.get("begins")) is not None:
            source.start_state = begins
        if news.get("closed"):
            self.is_too_far_behind |= self._sources.keys() == {rank}
            self.drop_member(rank)
            if not self._sources:
                self._restart("this replica is too far behind: the others wait while it is given the state")
                self._request_admission_once()
        self._request_pieces()
        self._wake()

    def _handle_result(
        self,
        source: _SnapshotSource,
        number: int,
        exchange: int,
        part: int,
        begun_step: int,
        nbytes: int,
        first_retained: int,
    ) -> None:
        assert self._chosen_source is not None
        self._first_retained = max(self._first_retained, first_retained)
        if (
            source.snapshot_key != self._chosen_source.snapshot_key
            and number <= self._chosen_source.num_started
        ):
            return
        if number in self.results or (number < self._first_retained and number not in self._contents):
            source.fetched_numbers.append(number)
            return
        source.results.add(number)
        if number not in self._index:
            self._index[number] = exchange, part, begun_step
            self._numbers[exchange, part] = number
            self._contents[number] = _Content(nbytes)

    def _handle_view(
        self, number: int, members: Sequence[int], newest: Sequence[int], changes: Sequence[Any]
    ) -> None:
        """Enters a view announced by members: results that it does not contain are repeated."""
        if number <= self._view_number:
            return
        self._view_number = number
        self._replace_changes(changes)
        for rank in self._sources.keys() - set(members):
            self.drop_member(rank)
        base, *later = newest
        lost_numbers = [n for n in self._index if n > base and n not in later]
        if any(n in self.followed_exchanges for n in lost_numbers):
            self._restart("a result that this replica has followed is made again")
            self._request_snapshot()
            return
        for n in lost_numbers:
            exchange, part, _ = self._index.pop(n)
            self._numbers.pop((exchange, part), None)
            self._contents.pop(n, None)
            self.results.pop(n, None)
            for source in self._sources.values():
                source.results.discard(n)
                source.fetched_numbers = [number for number in source.fetched_numbers if number != n]
                source.pending_requests = {
                    asked: request for asked, request in source.pending_requests.items() if asked[0] != n
                }

    def drop_member(self, rank: int) -> None:
        """Continues without a member."""
        self._release(rank)
        if self._sources.pop(rank, None) is None:
            return
        if self._sources:
            self._choose_source()
            self._request_pieces()
        else:
            self._request_snapshot()
        self._wake()

    def retry_requests(self, rank: int) -> None:
        """Repeats the unanswered requests to a member after its reconnection."""
        self._release(rank)
        self._request_pieces()

    def _release(self, rank: int) -> None:
        """Cancels the requests to a member."""
        if (source := self._sources.get(rank)) is None:
            return
        pending, source.pending_requests = source.pending_requests, {}
        for name, begin, nbytes in pending:
            content = self._parts.get(name) if isinstance(name, str) else self._contents.get(name)
            if content is not None:
                content.pending_ranges.insert(0, (begin, begin + nbytes))

    def _choose_source(self) -> None:
        """Chooses one of the offered snapshots; restarts if the current one is no longer offered."""
        if self._chosen_source is not None and any(map(self._has_enough, self._sources.values())):
            return
        if self._step is not None:
            self._restart("no member is left that has what this replica lacks")
            self._request_snapshot()
            return
        self._chosen_source = max(self._sources.values(), key=lambda source: source.step)
        self._parts = {d: content for d, content in self._parts.items() if d in self._chosen_source.parts}
        for digest, nbytes in self._chosen_source.parts.items():
            self._parts.setdefault(digest, _Content(nbytes))

    # --- fetching ---------------------------------------------------------------------------------------------------

    def _request_pieces(self) -> None:
        """Requests the next pieces from members, up to their windows."""
        if self._chosen_source is None:
            return
        contents: list[tuple[ContentName, _Content]] = [
            (d, self._parts[d]) for d in self._chosen_source.parts
        ]
        if self._is_complete():
            contents = sorted(self._contents.items())
        contents = [(name, content) for name, content in contents if content.pending_ranges]
        for rank, source in sorted(self._sources.items()):
            for name, content in contents:
                is_held = name in source.parts if isinstance(name, str) else name in source.results
                while is_held and content.pending_ranges and source.room_nbytes > 0:
                    max_nbytes = min(max(source.window_nbytes // 4, _PIECE_NBYTES), _MAX_PIECE_NBYTES)
                    begin, nbytes = content.take_range(max_nbytes)
                    source.pending_requests[name, begin, nbytes] = self._runtime.read_clock()
                    text = json.dumps(
                        [self._view_number, source.fetched_numbers, name, begin, nbytes]
                    ).encode()
                    source.fetched_numbers.clear()
                    self._comm.send(build_payload(text), rank, REQUESTS, -1)

    def receive_piece(self, rank: int, head: bytes, piece: Tensor) -> None:
        """Stores a piece if it is requested; raises ``ValueError`` or ``TypeError`` if its head is malformed."""
        name, begin = json.loads(head)
        nbytes, source = len(piece), self._sources.get(rank)
        request_s = source.pending_requests.pop((name, begin, nbytes), None) if source is not None else None
        content = self._parts.get(name) if isinstance(name, str) else self._contents.get(name)
        if source is None or content is None or request_s is None:
            return
        queue_s = _WAITED_FOR_S if self.is_waited_for else _QUEUE_S
        source.record_answer(nbytes, self._runtime.read_clock() - request_s, queue_s)
        content.put_piece(begin, piece)
        self.received_nbytes += nbytes
        if not content.missing_nbytes and isinstance(name, int):
            self.results[name] = unpack_tensors(content.data)
            del self._contents[name]
            for other_source in self._sources.values():
                if name in other_source.results:
                    other_source.fetched_numbers.append(name)
            self._num_fetched += 1
            self._deliver_results()
            self._check_backlog()
        self._request_pieces()
        self._wake()

    def _deliver_results(self) -> None:
        """Completes each waiting exchange whose result has arrived."""
        for key, logged in list(self._waiting_exchanges.items()):
            number = self._numbers.get(key)
            if number in self.results:
                del self._waiting_exchanges[key]
                logged.number = number
                self.followed_exchanges[number] = logged
                logged.result.set_result(
                    logged.result_codec.unpack(tuple(tensor.clone() for tensor in self.results[number]))
                )

    def _check_backlog(self) -> None:
        """Asks for admission if the backlog no longer shrinks, so that the others wait for the remaining results."""
        if self._step is None or self._num_fetched < self._round_backlog:
            return
        backlog = sum(begun >= self._step for _, _, begun in self._index.values())
        if self._round_backlog and backlog >= self._round_backlog:
            self._request_admission_once()
        self._round_backlog, self._num_fetched = backlog, 0
