"""Records: several messages share the connections of two ranks, and tensors arrive in pieces.

A record is a header (size, kind, three bytes of zero) and ``size`` bytes. A ``HEAD`` carries the head of a message, a
``PIECE`` a piece of one of its large tensors, a ``WITHDRAWN`` the number of a message that is not completed. Messages
with large tensors are numbered from 1 on, in the order of their heads. Heads and ``WITHDRAWN`` take the first
connection of a pair; pieces take any connection with room. This module is independent of sockets.
"""

from __future__ import annotations

import heapq
import struct
from collections.abc import Callable, Iterator, Sequence
from enum import IntEnum
from typing import NamedTuple, TypeAlias

from torch import Tensor

from farflung.comm.framing import LOCAL_PIECE_NBYTES, MORE_NBYTES, RECORD_NBYTES
from farflung.comm.wire import Frame, Head, Message, WireError, read_head
from farflung.tasks import Pending, done

__all__ = [
    "CONTROL",
    "FIRST",
    "HEAD_MOST",
    "LAST",
    "Chunk",
    "Landings",
    "Receiver",
    "Record",
    "Sender",
    "Withdrawn",
]

HEAD_MOST = 1 << 18
"""Largest head, in bytes."""
FIRST, LAST = -(1 << 31), (1 << 31) - 1
"""Priorities of control messages: before and behind all others."""
CONTROL = -1
"""View of messages that are never withdrawn."""

_RECORD = struct.Struct("<IB3x")
_MORE = struct.Struct("<IB3xIBQ")
_WITHDRAWN = struct.Struct("<IB3xI")
_SCRATCH = 1 << 16
_WORTH = 1 << 12
"""Least room in a chunk for which a piece is added."""
_AT_ONCE = 1024
"""Most messages of one peer that may have arrived in part."""
_LEFT = done(None)


class Record(IntEnum):
    """Kind of a record."""

    HEAD = 0
    MORE = 1
    WITHDRAWN = 2
    LINKS = 3
    """Requested number of connections between the two ranks."""


_SIZES = {Record.WITHDRAWN: 4, Record.LINKS: 1}


class Withdrawn(Exception):
    """Error of a message that was withdrawn before it had left."""


class _Outgoing:
    """An outgoing message."""

    __slots__ = ("frames", "left", "number", "offset", "tensor", "unsent", "view")

    def __init__(self, frames: Sequence[Frame], view: int) -> None:
        self.frames, self.view = frames, view
        self.left: Pending[None] = _LEFT if len(frames) == 1 else Pending()
        self.number, self.tensor, self.offset, self.unsent = 0, 0, 0, 0

    @property
    def dealt(self) -> bool:
        return self.number > 0 and self.tensor == len(self.frames) - 1

    @property
    def nbytes(self) -> int:
        """Bytes that have not been taken."""
        frames = self.frames[self.tensor + 1 :] if self.number else self.frames
        return sum(map(len, frames)) - self.offset

    def piece(self, room: int) -> tuple[bytes, memoryview]:
        """Takes the next piece of at most ``max_nbytes`` bytes; returns its header and bytes."""
        tensor, offset = self.tensor, self.offset
        frame = memoryview(self.frames[tensor + 1])
        part = frame[offset : offset + room]
        self.offset += len(part)
        if self.offset == len(frame):
            self.tensor, self.offset = tensor + 1, 0
        self.unsent += 1
        return _MORE.pack(MORE_NBYTES + len(part), Record.MORE, self.number, tensor, offset), part


class Chunk(NamedTuple):
    """Bytes that a connection sends next.

    Args:
      buffers: Buffers to send.
      pieces: Messages whose pieces it contains.
    """

    buffers: list[Frame]
    pieces: list[_Outgoing]


class Sender:
    """Outgoing messages to one peer, smallest priority first."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, _Outgoing]] = []
        """Messages whose head has not been taken: a heap by priority and order."""
        self._begun: list[tuple[int, int, _Outgoing]] = []
        """Messages whose head has been taken, and some of whose pieces have not: a heap too."""
        self._order = self._count = 0
        self._records: list[bytes] = []
        """Records that are taken first."""
        self.taken_nbytes = 0
        """Bytes of large tensors that connections have taken so far."""

    @property
    def nbytes(self) -> int:
        """Bytes that no connection has taken."""
        return sum(message.nbytes for queue in (self._waiting, self._begun) for *_, message in queue)

    def has(self, *, first: bool) -> bool:
        """Returns True if there are bytes for the first connection, or for another one."""
        return bool(self._begun or (first and (self._waiting or self._records)))

    def put(self, frames: Sequence[Frame], priority: int, view: int) -> Pending[None]:
        """Queues a message behind all of its priority.

        Args:
          frames: Frames of the message, see :func:`farflung.comm.wire.encode`.
          priority: The smallest is taken first.
          view: Number of the view, for :meth:`withdraw`.

        Returns:
          Done when the last piece has left; for a message without pieces, at once.
        """
        message = _Outgoing(frames, view)
        self._order += 1
        heapq.heappush(self._waiting, (priority, self._order, message))
        return message.left

    def links(self, count: int) -> None:
        """Queues a ``CONNECTIONS`` record."""
        self._records.append(_RECORD.pack(1, Record.LINKS) + bytes([count]))

    def take(self, room: int, *, first: bool) -> Chunk | None:
        """Takes the next bytes for a connection; returns None if there are none.

        Args:
          max_nbytes: Approximate limit of bytes.
          is_first: True for the first connection of the pair, which takes the heads.
        """
        small: list[Frame] = []
        chunk = Chunk([], [])
        if first and self._records:
            small, self._records = list(self._records), []
        while True:
            has_waiting = first and bool(self._waiting)
            if has_waiting and (not self._begun or self._waiting[0] < self._begun[0]):
                priority, order, message = heapq.heappop(self._waiting)
                head = message.frames[0]
                small += (_RECORD.pack(len(head), Record.HEAD), head)
                room -= RECORD_NBYTES + len(head)
                if len(message.frames) > 1:
                    self._count += 1
                    message.number = self._count
                    heapq.heappush(self._begun, (priority, order, message))
                if room <= 0:
                    break
            elif self._begun and (room >= _WORTH or not (small or chunk.buffers)):
                message = self._begun[0][2]
                header, part = message.piece(room)
                self.taken_nbytes += len(part)
                small.append(header)
                chunk.buffers.extend((b"".join(small), part))
                chunk.pieces.append(message)
                small = []
                room -= len(header) + len(part)
                if message.dealt:
                    heapq.heappop(self._begun)
            else:
                break
        if small:
            chunk.buffers.append(b"".join(small))
        return chunk if chunk.buffers else None

    @staticmethod
    def left(chunk: Chunk) -> None:
        """Marks a chunk as sent."""
        for message in chunk.pieces:
            message.unsent -= 1
            if not message.unsent and message.dealt:
                message.left.set(None)

    def withdraw(self, view: int) -> None:
        """Withdraws a view's queued messages; notifies the peer of those that have been sent in part."""
        dropped = [item for queue in (self._waiting, self._begun) for *_, item in queue if item.view == view]
        self._waiting = [entry for entry in self._waiting if entry[2].view != view]
        self._begun = [entry for entry in self._begun if entry[2].view != view]
        for queue in (self._waiting, self._begun):
            heapq.heapify(queue)
        self._records += [
            _WITHDRAWN.pack(4, Record.WITHDRAWN, item.number) for item in dropped if item.number
        ]
        for item in dropped:
            item.left.fail(Withdrawn())

    def close(self, error: BaseException, *, keep_control: bool = False) -> None:
        """Fails all queued messages; ``keep_control`` keeps control messages."""
        queued = [*self._waiting, *self._begun]
        self._waiting = [entry for entry in self._waiting if keep_control and entry[2].view == CONTROL]
        self._begun, self._records = [], []
        for entry in queued:
            entry[2].left.fail(error)


# --- receiving ------------------------------------------------------------------------------------------------------


Memory: TypeAlias = Callable[[Head, int], Tensor]


class _Landing:
    """A message whose tensors arrive in pieces, in any order."""

    def __init__(self, head: Head, memory: Memory) -> None:
        self.head, self._memory = head, memory
        self._tensors: list[Tensor | None] = [None] * len(head.large)
        self._gaps = [[(0, nbytes)] for nbytes in head.large]
        """Byte ranges of each tensor of which no piece has begun to arrive."""
        self.missing = sum(head.large)

    def target(self, tensor: int, offset: int, nbytes: int) -> memoryview:
        """Returns the memory of a piece.

        Raises:
          WireError: the piece is outside of this message, or has arrived before.
        """
        end = offset + nbytes
        ranges = self._gaps[tensor] if tensor < len(self._gaps) else []
        at = next((at for at, (low, high) in enumerate(ranges) if low <= offset and end <= high), None)
        if at is None or not nbytes:
            raise WireError(
                f"{nbytes} bytes at {offset} of tensor {tensor} that were not described, or twice"
            )
        low, high = ranges[at]
        ranges[at : at + 1] = [gap for gap in ((low, offset), (end, high)) if gap[0] < gap[1]]
        memory = self._tensors[tensor]
        if memory is None:
            memory = self._tensors[tensor] = self._memory(self.head, tensor)
        return memory.numpy().data[offset:end]

    def message(self) -> Message:
        """Builds the message, once no bytes are missing."""
        return self.head.message([tensor for tensor in self._tensors if tensor is not None])


class Landings:
    """Partially received messages of one peer.

    Args:
      allocate: Allocates one of the large tensors of a message, by number, as bytes.
      get_max_nbytes: Returns the largest payload accepted.
    """

    def __init__(self, memory: Memory, max_nbytes: Callable[[], int]) -> None:
        self._memory, self._max_nbytes = memory, max_nbytes
        self.nbytes = 0
        """Bytes of large tensors received so far."""
        self._begun: dict[int, _Landing] = {}
        self._withdrawn: dict[int, None] = {}
        """Numbers withdrawn last; their pieces may still arrive on connections other than the first."""
        self._count = 0

    def begin(self, frame: memoryview) -> Message | None:
        """Begins a message by its head; returns the message if it has no large tensors.

        Raises:
          WireError: it is refused.
        """
        head = read_head(frame)
        head.check(self._max_nbytes())
        if not head.large:
            return head.message()
        if len(self._begun) >= _AT_ONCE:
            raise WireError("more messages in parts than may be")
        self._count += 1
        self._begun[self._count] = _Landing(head._replace(frame=bytearray(frame)), self._memory)
        return None

    def withdraw(self, number: int) -> None:
        """Drops a message that will not be completed; ignores one that is complete.

        Raises:
          WireError: it has not begun.
        """
        if number > self._count:
            raise WireError(f"message {number} withdrawn, which has not begun")
        if self._begun.pop(number, None) is not None:
            self._withdrawn[number] = None
            if len(self._withdrawn) > _AT_ONCE:
                del self._withdrawn[next(iter(self._withdrawn))]

    def due(self, number: int) -> bool:
        """Returns True if the head of a message may still come."""
        return self._count < number <= self._count + _AT_ONCE

    def find(self, number: int) -> _Landing | None:
        """Finds a message that has begun; returns None if it was withdrawn.

        Raises:
          WireError: it has not begun, or is complete.
        """
        partial = self._begun.get(number)
        if partial is None and number not in self._withdrawn:
            raise WireError(f"a piece of message {number}, which is not under way")
        return partial

    def landed(self, number: int, landing: _Landing, nbytes: int) -> Message | None:
        """Records received bytes of a message; returns the message once it is complete."""
        landing.missing -= nbytes
        self.nbytes += nbytes
        if landing.missing or self._begun.pop(number, None) is None:
            return None
        return landing.message()


class Receiver:
    """Parser of the bytes that arrive over one connection.

    Args:
      buffers: Partial messages of the peer, shared by all of its connections.
      is_first: True for the first of these connections.
      on_connection_count: Called with the number in a ``CONNECTIONS`` record.
    """

    def __init__(self, landings: Landings, *, first: bool, links: Callable[[int], None]) -> None:
        self._landings, self._first, self._links = landings, first, links
        self._scratch = memoryview(bytearray(_SCRATCH))
        self._begin = self._end = 0
        """Range of unread bytes in the scratch buffer."""
        self._target: memoryview | None = None
        """Memory of the missing rest of the current piece."""
        self._number = 0
        self._landing: _Landing | None = None
        self.paused = False
        """True if the next record is a piece of a message whose head has not arrived over the first connection."""
        self.nbytes = 0
        """Size of the record read last, for errors."""

    def room(self) -> memoryview:
        """Returns the memory for the next bytes."""
        if self._target is not None:
            return self._target
        if self._begin:
            unread_nbytes = self._end - self._begin
            self._scratch[:unread_nbytes] = self._scratch[self._begin : self._end]
            self._begin, self._end = 0, unread_nbytes
        return self._scratch[self._end :]

    def took(self, nbytes: int) -> Iterator[Message]:
        """Parses bytes that were written to :meth:`get_buffer`; yields the messages that they complete.

        Raises:
          WireError: the bytes are malformed; none after them are read.
        """
        if self._target is not None:
            yield from self._land(nbytes)
        else:
            self._end += nbytes
        self.paused = False
        while self._target is None and not self.paused and (record := self._record()) is not None:
            kind, body = record
            if kind == Record.MORE:
                yield from self._piece()
            elif kind == Record.HEAD:
                self._begin += RECORD_NBYTES + len(body)
                message = self._landings.begin(body)
                if message is not None:
                    yield message
            else:
                self._begin += RECORD_NBYTES + len(body)
                if kind == Record.WITHDRAWN:
                    self._landings.withdraw(int.from_bytes(body, "little"))
                else:
                    self._links(body[0])

    def _record(self) -> tuple[int, memoryview] | None:
        """Returns kind and bytes of the next record (of a piece, only its header), or None if it is incomplete."""
        unread_nbytes = self._end - self._begin
        if unread_nbytes < RECORD_NBYTES:
            return None
        size, kind = _RECORD.unpack_from(self._scratch, self._begin)
        self.nbytes, body = size, size
        if kind == Record.MORE and size > MORE_NBYTES:
            body = MORE_NBYTES
        elif not self._first or not (_SIZES.get(kind) == size or (kind == Record.HEAD and size <= HEAD_MOST)):
            raise WireError("not a record of this protocol")
        begin = self._begin + RECORD_NBYTES
        if unread_nbytes >= RECORD_NBYTES + body:
            return kind, self._scratch[begin : begin + body]
        if RECORD_NBYTES + body > len(self._scratch):
            larger = memoryview(bytearray(RECORD_NBYTES + body))
            larger[:unread_nbytes] = self._scratch[self._begin : self._end]
            self._scratch, self._begin, self._end = larger, 0, unread_nbytes
        return None

    def _piece(self) -> Iterator[Message]:
        size, _, number, tensor, offset = _MORE.unpack_from(self._scratch, self._begin)
        if not self._first and self._landings.due(number):
            self.paused = True
            return
        nbytes = size - MORE_NBYTES
        self._number, self._landing = number, self._landings.find(number)
        if self._landing is None:
            if nbytes > LOCAL_PIECE_NBYTES:
                raise WireError(f"a piece of {nbytes} bytes")
            self._target = memoryview(bytearray(nbytes))
        else:
            self._target = self._landing.target(tensor, offset, nbytes)
        begin = self._begin + RECORD_NBYTES + MORE_NBYTES
        available_nbytes = min(nbytes, self._end - begin)
        self._target[:available_nbytes] = self._scratch[begin : begin + available_nbytes]
        self._begin = begin + available_nbytes
        if self._begin == self._end:
            self._begin = self._end = 0
        yield from self._land(available_nbytes)

    def _land(self, nbytes: int) -> Iterator[Message]:
        """Records bytes that have arrived in the target."""
        assert self._target is not None
        self._target = self._target[nbytes:] if nbytes < len(self._target) else None
        if self._landing is not None:
            message = self._landings.landed(self._number, self._landing, nbytes)
            if message is not None:
                yield message
