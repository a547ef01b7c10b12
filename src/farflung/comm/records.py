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

from farflung.comm.framing import (
    LOCAL_PIECE_NBYTES,
    PIECE_HEADER_NBYTES,
    RECORD_HEADER_NBYTES,
    URGENT_NBYTES,
)
from farflung.comm.wire import Frame, Head, Message, WireError, read_head
from farflung.tasks import Pending, create_completed

__all__ = [
    "CONTROL_VIEW",
    "FIRST_PRIORITY",
    "LAST_PRIORITY",
    "MAX_HEAD_NBYTES",
    "Chunk",
    "MessageWithdrawn",
    "Receiver",
    "RecordKind",
    "RecvBuffers",
    "Sender",
]

MAX_HEAD_NBYTES = 1 << 18
"""Largest head, in bytes."""
FIRST_PRIORITY, LAST_PRIORITY = -(1 << 31), (1 << 31) - 1
"""Priorities of control messages: before and behind all others."""
CONTROL_VIEW = -1
"""View of messages that are never withdrawn."""

_RECORD = struct.Struct("<IB3x")
_PIECE = struct.Struct("<IB3xIBQ")
_WITHDRAWN = struct.Struct("<IB3xI")
_SCRATCH_NBYTES = 1 << 16
_MIN_ROOM_NBYTES = 1 << 12
"""Least room in a chunk for which a piece is added."""
_MAX_PARTIAL_MESSAGES = 1024
"""Most messages of one peer that may have arrived in part."""
_SENT = create_completed(None)


class RecordKind(IntEnum):
    """Kind of a record."""

    HEAD = 0
    PIECE = 1
    WITHDRAWN = 2
    CONNECTIONS = 3
    """Requested number of connections between the two ranks."""


_SIZES = {RecordKind.WITHDRAWN: 4, RecordKind.CONNECTIONS: 1}


class MessageWithdrawn(Exception):
    """Error of a message that was withdrawn before it had left."""


class _OutgoingMessage:
    """An outgoing message."""

    __slots__ = ("frames", "num_unsent", "number", "offset", "sent", "tensor", "view")

    def __init__(self, frames: Sequence[Frame], view: int) -> None:
        self.frames, self.view = frames, view
        self.sent: Pending[None] = _SENT if len(frames) == 1 else Pending()
        self.number, self.tensor, self.offset, self.num_unsent = 0, 0, 0, 0

    @property
    def is_taken(self) -> bool:
        return self.number > 0 and self.tensor == len(self.frames) - 1

    @property
    def nbytes(self) -> int:
        """Bytes that have not been taken."""
        frames = self.frames[self.tensor + 1 :] if self.number else self.frames
        return sum(map(len, frames)) - self.offset

    def take_piece(self, max_nbytes: int) -> tuple[bytes, memoryview]:
        """Takes the next piece of at most ``max_nbytes`` bytes; returns its header and bytes."""
        tensor, offset = self.tensor, self.offset
        frame = memoryview(self.frames[tensor + 1])
        part = frame[offset : offset + max_nbytes]
        self.offset += len(part)
        if self.offset == len(frame):
            self.tensor, self.offset = tensor + 1, 0
        self.num_unsent += 1
        return _PIECE.pack(
            PIECE_HEADER_NBYTES + len(part), RecordKind.PIECE, self.number, tensor, offset
        ), part


class Chunk(NamedTuple):
    """Bytes that a connection sends next.

    Args:
      buffers: Buffers to send.
      pieces: Messages whose pieces it contains.
    """

    buffers: list[Frame]
    pieces: list[_OutgoingMessage]


class Sender:
    """Outgoing messages to one peer, smallest priority first."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, int, _OutgoingMessage]] = []
        """Messages whose head has not been taken: a heap by priority and order."""
        self._partial: list[tuple[int, int, _OutgoingMessage]] = []
        """Messages whose head has been taken, and some of whose pieces have not: a heap too."""
        self._current: _OutgoingMessage | None = None
        """Message whose piece was taken last."""
        self._order = self._count = 0
        self._records: list[bytes] = []
        """Records that are taken first."""
        self.dequeued_nbytes = 0
        """Bytes of large tensors that connections have taken so far."""
        self._urgent_until_nbytes = 0
        """Value of :attr:`dequeued_nbytes` up to which urgent messages are expected."""

    @property
    def queued_nbytes(self) -> int:
        """Bytes that no connection has taken."""
        return sum(message.nbytes for queue in (self._waiting, self._partial) for *_, message in queue)

    def has_data(self, *, is_first_connection: bool) -> bool:
        """Returns True if there are bytes for the first connection, or for another one."""
        return bool(self._partial or (is_first_connection and (self._waiting or self._records)))

    @property
    def expects_urgent(self) -> bool:
        """True if a message has recently come that is more urgent than queued ones, so that others may be about to."""
        return self.dequeued_nbytes < self._urgent_until_nbytes

    def put(self, frames: Sequence[Frame], priority: int, view: int) -> Pending[None]:
        """Queues a message behind all of its priority.

        Args:
          frames: Frames of the message, see :func:`farflung.comm.wire.encode`.
          priority: The smallest is taken first.
          view: Number of the view, for :meth:`withdraw`.

        Returns:
          Done when the last piece has left; for a message without pieces, at once.
        """
        if any(queue and priority < queue[0][0] for queue in (self._waiting, self._partial)):
            self._urgent_until_nbytes = self.dequeued_nbytes + URGENT_NBYTES
        message = _OutgoingMessage(frames, view)
        self._order += 1
        heapq.heappush(self._waiting, (priority, self._order, message))
        return message.sent

    def queue_connection_count(self, count: int) -> None:
        """Queues a ``CONNECTIONS`` record."""
        self._records.append(_RECORD.pack(1, RecordKind.CONNECTIONS) + bytes([count]))

    def take_chunk(self, max_nbytes: int, *, is_first_connection: bool) -> Chunk | None:
        """Takes the next bytes for a connection; returns None if there are none.

        Args:
          max_nbytes: Approximate limit of bytes.
          is_first_connection: True for the first connection of the pair, which takes the heads.
        """
        small: list[Frame] = []
        chunk = Chunk([], [])
        if is_first_connection and self._records:
            small, self._records = list(self._records), []
        while True:
            if is_first_connection and self._should_start_waiting():
                priority, order, message = heapq.heappop(self._waiting)
                head = message.frames[0]
                small += (_RECORD.pack(len(head), RecordKind.HEAD), head)
                max_nbytes -= RECORD_HEADER_NBYTES + len(head)
                if len(message.frames) > 1:
                    self._count += 1
                    message.number = self._count
                    heapq.heappush(self._partial, (priority, order, message))
                if max_nbytes <= 0:
                    break
            elif self._partial and (max_nbytes >= _MIN_ROOM_NBYTES or not (small or chunk.buffers)):
                self._current = message = self._partial[0][2]
                header, part = message.take_piece(max_nbytes)
                self.dequeued_nbytes += len(part)
                small.append(header)
                chunk.buffers.extend((b"".join(small), part))
                chunk.pieces.append(message)
                small = []
                max_nbytes -= len(header) + len(part)
                if message.is_taken:
                    heapq.heappop(self._partial)
            else:
                break
        if small:
            chunk.buffers.append(b"".join(small))
        return chunk if chunk.buffers else None

    def _should_start_waiting(self) -> bool:
        """Returns True if a waiting message comes next: the most urgent one, unless the current one is sooner done."""
        if not self._waiting or not self._partial:
            return bool(self._waiting)
        *waiting_rank, waiting = self._waiting[0]
        *partial_rank, partial = self._partial[0]
        return waiting_rank < partial_rank and (
            partial is not self._current or waiting.nbytes < partial.nbytes
        )

    @staticmethod
    def mark_sent(chunk: Chunk) -> None:
        """Marks a chunk as sent."""
        for message in chunk.pieces:
            message.num_unsent -= 1
            if not message.num_unsent and message.is_taken:
                message.sent.set_result(None)

    def withdraw(self, view: int) -> None:
        """Withdraws a view's queued messages; notifies the peer of those that have been sent in part."""
        dropped = [
            item for queue in (self._waiting, self._partial) for *_, item in queue if item.view == view
        ]
        self._waiting = [entry for entry in self._waiting if entry[2].view != view]
        self._partial = [entry for entry in self._partial if entry[2].view != view]
        for queue in (self._waiting, self._partial):
            heapq.heapify(queue)
        self._records += [
            _WITHDRAWN.pack(4, RecordKind.WITHDRAWN, item.number) for item in dropped if item.number
        ]
        for item in dropped:
            item.sent.set_exception(MessageWithdrawn())

    def close(self, error: BaseException, *, keep_control: bool = False) -> None:
        """Fails all queued messages; ``keep_control`` keeps control messages."""
        queued = [*self._waiting, *self._partial]
        self._waiting = [entry for entry in self._waiting if keep_control and entry[2].view == CONTROL_VIEW]
        self._partial, self._records = [], []
        for entry in queued:
            entry[2].sent.set_exception(error)


# --- receiving ------------------------------------------------------------------------------------------------------


TensorAllocator: TypeAlias = Callable[[Head, int], Tensor]


class _PartialMessage:
    """A message whose tensors arrive in pieces, in any order."""

    def __init__(self, head: Head, allocate: TensorAllocator) -> None:
        self.head, self._allocate = head, allocate
        self._tensors: list[Tensor | None] = [None] * len(head.layout.large_nbytes)
        self._gaps = [[(0, nbytes)] for nbytes in head.layout.large_nbytes]
        """Byte ranges of each tensor of which no piece has begun to arrive."""
        self.missing_nbytes = sum(head.layout.large_nbytes)

    def get_target(self, tensor: int, offset: int, nbytes: int) -> memoryview:
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
            memory = self._tensors[tensor] = self._allocate(self.head, tensor)
        return memory.numpy().data[offset:end]

    def build_message(self) -> Message:
        """Builds the message, once no bytes are missing."""
        return self.head.build_message([tensor for tensor in self._tensors if tensor is not None])


class RecvBuffers:
    """Partially received messages of one peer.

    Args:
      allocate: Allocates one of the large tensors of a message, by number, as bytes.
      get_max_nbytes: Returns the largest payload accepted.
    """

    def __init__(self, allocate: TensorAllocator, get_max_nbytes: Callable[[], int]) -> None:
        self._allocate, self._get_max_nbytes = allocate, get_max_nbytes
        self.received_nbytes = 0
        """Bytes of large tensors received so far."""
        self._partial: dict[int, _PartialMessage] = {}
        self._withdrawn: dict[int, None] = {}
        """Numbers withdrawn last; their pieces may still arrive on connections other than the first."""
        self._count = 0

    def begin_message(self, frame: memoryview) -> Message | None:
        """Begins a message by its head; returns the message if it has no large tensors.

        Raises:
          WireError: it is refused.
        """
        head = read_head(frame, self._get_max_nbytes())
        if not head.layout.large_nbytes:
            return head.build_message()
        if len(self._partial) >= _MAX_PARTIAL_MESSAGES:
            raise WireError("more messages in parts than may be")
        self._count += 1
        self._partial[self._count] = _PartialMessage(head._replace(frame=bytearray(frame)), self._allocate)
        return None

    def withdraw(self, number: int) -> None:
        """Drops a message that will not be completed; ignores one that is complete.

        Raises:
          WireError: it has not begun.
        """
        if number > self._count:
            raise WireError(f"message {number} withdrawn, which has not begun")
        if self._partial.pop(number, None) is not None:
            self._withdrawn[number] = None
            if len(self._withdrawn) > _MAX_PARTIAL_MESSAGES:
                del self._withdrawn[next(iter(self._withdrawn))]

    def can_begin(self, number: int) -> bool:
        """Returns True if the head of a message may still come."""
        return self._count < number <= self._count + _MAX_PARTIAL_MESSAGES

    def find_message(self, number: int) -> _PartialMessage | None:
        """Finds a message that has begun; returns None if it was withdrawn.

        Raises:
          WireError: it has not begun, or is complete.
        """
        partial = self._partial.get(number)
        if partial is None and number not in self._withdrawn:
            raise WireError(f"a piece of message {number}, which is not under way")
        return partial

    def record_bytes(self, number: int, partial: _PartialMessage, nbytes: int) -> Message | None:
        """Records received bytes of a message; returns the message once it is complete."""
        partial.missing_nbytes -= nbytes
        self.received_nbytes += nbytes
        if partial.missing_nbytes or self._partial.pop(number, None) is None:
            return None
        return partial.build_message()


class Receiver:
    """Parser of the bytes that arrive over one connection.

    Args:
      buffers: Partial messages of the peer, shared by all of its connections.
      is_first_connection: True for the first of these connections.
      on_connection_count: Called with the number in a ``CONNECTIONS`` record.
    """

    def __init__(
        self, buffers: RecvBuffers, *, is_first_connection: bool, on_connection_count: Callable[[int], None]
    ) -> None:
        self._buffers = buffers
        self._is_first = is_first_connection
        self._on_connection_count = on_connection_count
        self._scratch = memoryview(bytearray(_SCRATCH_NBYTES))
        self._begin = self._end = 0
        """Range of unread bytes in the scratch buffer."""
        self._target: memoryview | None = None
        """Memory of the missing rest of the current piece."""
        self._number = 0
        self._partial: _PartialMessage | None = None
        self.is_paused = False
        """True if the next record is a piece of a message whose head has not arrived over the first connection."""
        self.record_nbytes = 0
        """Size of the record read last, for errors."""

    @property
    def missing_nbytes(self) -> int:
        """Bytes of the piece under way that have not arrived; 0 between two pieces."""
        return 0 if self._target is None else len(self._target)

    def get_buffer(self) -> memoryview:
        """Returns the memory for the next bytes."""
        if self._target is not None:
            return self._target
        if self._begin:
            unread_nbytes = self._end - self._begin
            self._scratch[:unread_nbytes] = self._scratch[self._begin : self._end]
            self._begin, self._end = 0, unread_nbytes
        return self._scratch[self._end :]

    def parse_bytes(self, nbytes: int) -> Iterator[Message]:
        """Parses bytes that were written to :meth:`get_buffer`; yields the messages that they complete.

        Raises:
          WireError: the bytes are malformed; none after them are read.
        """
        if self._target is not None:
            yield from self._record_bytes(nbytes)
        else:
            self._end += nbytes
        self.is_paused = False
        while self._target is None and not self.is_paused and (record := self._parse_record()) is not None:
            kind, body = record
            if kind == RecordKind.PIECE:
                yield from self._parse_piece()
            elif kind == RecordKind.HEAD:
                self._begin += RECORD_HEADER_NBYTES + len(body)
                message = self._buffers.begin_message(body)
                if message is not None:
                    yield message
            else:
                self._begin += RECORD_HEADER_NBYTES + len(body)
                if kind == RecordKind.WITHDRAWN:
                    self._buffers.withdraw(int.from_bytes(body, "little"))
                else:
                    self._on_connection_count(body[0])

    def _parse_record(self) -> tuple[int, memoryview] | None:
        """Returns kind and bytes of the next record (of a piece, only its header), or None if it is incomplete."""
        unread_nbytes = self._end - self._begin
        if unread_nbytes < RECORD_HEADER_NBYTES:
            return None
        size, kind = _RECORD.unpack_from(self._scratch, self._begin)
        self.record_nbytes, body = size, size
        if kind == RecordKind.PIECE and size > PIECE_HEADER_NBYTES:
            body = PIECE_HEADER_NBYTES
        elif not self._is_first or not (
            _SIZES.get(kind) == size or (kind == RecordKind.HEAD and size <= MAX_HEAD_NBYTES)
        ):
            raise WireError("not a record of this protocol")
        begin = self._begin + RECORD_HEADER_NBYTES
        if unread_nbytes >= RECORD_HEADER_NBYTES + body:
            return kind, self._scratch[begin : begin + body]
        if RECORD_HEADER_NBYTES + body > len(self._scratch):
            larger = memoryview(bytearray(RECORD_HEADER_NBYTES + body))
            larger[:unread_nbytes] = self._scratch[self._begin : self._end]
            self._scratch, self._begin, self._end = larger, 0, unread_nbytes
        return None

    def _parse_piece(self) -> Iterator[Message]:
        size, _, number, tensor, offset = _PIECE.unpack_from(self._scratch, self._begin)
        if not self._is_first and self._buffers.can_begin(number):
            self.is_paused = True
            return
        nbytes = size - PIECE_HEADER_NBYTES
        self._number, self._partial = number, self._buffers.find_message(number)
        if self._partial is None:
            if nbytes > LOCAL_PIECE_NBYTES:
                raise WireError(f"a piece of {nbytes} bytes")
            self._target = memoryview(bytearray(nbytes))
        else:
            self._target = self._partial.get_target(tensor, offset, nbytes)
        begin = self._begin + RECORD_HEADER_NBYTES + PIECE_HEADER_NBYTES
        available_nbytes = min(nbytes, self._end - begin)
        self._target[:available_nbytes] = self._scratch[begin : begin + available_nbytes]
        self._begin = begin + available_nbytes
        if self._begin == self._end:
            self._begin = self._end = 0
        yield from self._record_bytes(available_nbytes)

    def _record_bytes(self, nbytes: int) -> Iterator[Message]:
        """Records bytes that have arrived in the target."""
        assert self._target is not None
        self._target = self._target[nbytes:] if nbytes < len(self._target) else None
        if self._partial is not None:
            message = self._buffers.record_bytes(self._number, self._partial, nbytes)
            if message is not None:
                yield message
