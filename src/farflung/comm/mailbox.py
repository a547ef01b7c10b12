"""Mailbox: matches messages to pending receives by sender and tag."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farflung.comm.channel import describe_tag, is_control_plane
from farflung.errors import DeadlinePassed, ProtocolError, WaitEnded
from farflung.tasks import Pending, create_completed, create_failed
from farflung.types import Payload, Tag, TensorSpec

__all__ = [
    "MAX_UNRECEIVED_NBYTES",
    "PROBES_PER_DEADLINE",
    "IntervalSet",
    "Mailbox",
    "MailboxFull",
    "PendingRecv",
    "PendingRecvs",
    "check_expected",
]


MAX_FUTURE_NBYTES = 1 << 30
"""Most stored bytes of messages of newer views."""
MAX_UNRECEIVED_NBYTES = 1 << 28
"""Most stored bytes of each untrusted sender, see :class:`Mailbox`."""
PROBES_PER_DEADLINE = 4
"""Number of probes for signs of life in each deadline, while a wait lasts."""
_ENTRY_OVERHEAD_NBYTES = 1 << 10
"""Bytes of a stored message besides its tensors."""


class MailboxFull(Exception):
    """Error of a message that exceeds the mailbox's limit."""


class PendingRecv(NamedTuple):
    """A pending receive.

    Args:
      src: Rank of the sender; None for any rank.
      tag: Tag of the message.
      start_s: Time at which the wait began, in seconds.
      due_s: Time at which it fails alone, in seconds; None under the run's deadline.
      expect: Expected dtypes and shapes of the message's tensors; None for any.
      message: The message, or a tuple of sender and message if ``src`` is None.
    """

    src: int | None
    tag: Tag
    start_s: float
    due_s: float | None
    expect: tuple[TensorSpec, ...] | None
    message: Pending[Any]

    @property
    def description(self) -> str:
        return describe_tag(self.tag)

    def complete(self, src: int, payload: Payload) -> None:
        """Completes with a message, or fails if its tensors are not the expected ones."""
        try:
            if self.expect is not None:
                check_expected(payload, self.expect, src, self.description)
        except ProtocolError as error:
            self.message.set_exception(error)
        else:
            self.message.set_result((src, payload) if self.src is None else payload)


class PendingRecvs:
    """Pending receives of a mailbox, by sender and tag."""

    def __init__(self) -> None:
        self._waits: dict[tuple[int | None, Tag], PendingRecv] = {}
        """Waits, oldest first."""

    def __iter__(self) -> Iterator[PendingRecv]:
        """Iterates over the waits, which may end meanwhile."""
        return iter(list(self._waits.values()))

    def add(self, waiting: PendingRecv) -> None:
        """Adds a wait; raises ``RuntimeError`` if there is one for the same message."""
        if (waiting.src, waiting.tag) in self._waits:
            raise RuntimeError(f"two receives for {waiting.description} from {waiting.src}")
        self._waits[waiting.src, waiting.tag] = waiting

    def pop(self, src: int, tag: Tag) -> PendingRecv | None:
        """Removes the wait for a message, or else one for its tag from any rank."""
        return self._waits.pop((src, tag), None) or self._waits.pop((None, tag), None)

    def get_oldest(self) -> PendingRecv | None:
        """Returns the oldest wait under the run's deadline."""
        return next((waiting for waiting in self._waits.values() if waiting.due_s is None), None)

    def get_any(self) -> PendingRecv | None:
        """Returns the oldest wait under the run's deadline, or else a timed one, preferably for a single rank."""
        return self.get_oldest() or min(self, key=lambda waiting: waiting.src is None, default=None)

    def fail(self, waiting: PendingRecv, error: BaseException) -> None:
        self._waits.pop((waiting.src, waiting.tag), None)
        waiting.message.set_exception(error)

    def fail_due(self, time_s: float) -> float | None:
        """Fails the timed waits whose deadline has passed, with :class:`farflung.errors.DeadlinePassed`.

        Returns:
          The earliest deadline of the others, in seconds; None if there is none.
        """
        timed = [(waiting, waiting.due_s) for waiting in self._waits.values() if waiting.due_s is not None]
        for waiting, due_s in timed:
            if due_s <= time_s:
                waited_s = time_s - waiting.start_s
                self.fail(waiting, DeadlinePassed(waiting.src, waiting.description, waited_s))
        return min((due_s for _, due_s in timed if time_s < due_s < math.inf), default=None)


class Mailbox:
    """Receiving half of a communicator. Not thread-safe: it belongs to its driver's thread.

    Args:
      read_clock: Clock, in seconds.
      max_unreceived_nbytes: Most bytes of unreceived messages stored for each sender; one message always is.
      call_at: Calls a function at a time in seconds, for deadlines; None if the driver calls
        :meth:`PendingRecvs.fail_due`.
    """

    def __init__(
        self,
        read_clock: Callable[[], float],
        *,
        max_unreceived_nbytes: float = math.inf,
        call_at: Callable[[float, Callable[[], Any]], object] | None = None,
    ) -> None:
        self._read_clock, self._call_at = read_clock, call_at
        self._max_unreceived_nbytes = max_unreceived_nbytes
        self.waits = PendingRecvs()
        """Receives whose message has not arrived."""
        self._stored_nbytes: Counter[int] = Counter()
        """Bytes of unreceived messages, by sender."""
        self._stored: dict[Tag, dict[int, list[tuple[int, Payload]]]] = {}
        """Unreceived messages by tag and sender, each with its number in order of arrival."""
        self._num_stored = 0
        """Number of messages stored so far."""
        self._recv_buffers: dict[tuple[int, Tag], Tensor] = {}
        """Memory that messages may be received into."""
        self._cancelled = IntervalSet()
        self.ended: Pending[None] = Pending()
        """Fails once the view has ended, with the error that all waits fail with."""
        self._sender_errors: dict[int, BaseException] = {}
        self.arrivals, self.departures = EventQueue("an arrival"), EventQueue("a departure")
        """Members that were admitted, see :meth:`admit_sender`, and those that have left or were lost."""
        self.view = 0
        """Number of the view whose messages are received."""
        self._future_messages: list[tuple[int, int, Tag, Payload]] = []
        """Messages of newer views: number of the view, sender, tag and message."""
        self.num_dropped = 0
        """Number of dropped messages: of cancelled exchanges, of older views, and beyond the limit of bytes."""

    # --- receiving ------------------------------------------------------------------------------------------------

    def recv(
        self,
        src: int | None,
        tag: Tag,
        expect: tuple[TensorSpec, ...] | None = None,
        *,
        deadline_s: float | None = None,
    ) -> Pending[Any]:
        """Receives a message of one rank, or with its sender one of any rank if ``src`` is None.

        See :meth:`farflung.types.Group.recv`.
        """
        start_s = self._read_clock()
        due_s = None if deadline_s is None else start_s + deadline_s
        if self._call_at is not None and due_s is not None and due_s < math.inf:
            self._call_at(due_s, partial(self.waits.fail_due, due_s))
        waiting = PendingRecv(src, tag, start_s, due_s, expect, Pending())
        senders = self._stored.get(tag, {})
        if src is None:
            src = min(senders, key=lambda sender: senders[sender][0][0], default=None)
        if src is not None and src in senders:
            waiting.complete(src, self._pop_message(src, tag))
            return waiting.message
        error = self.ended.error
        if error is None and tag.exchange in self._cancelled:
            error = WaitEnded(src, waiting.description)
        if error is None and src is not None:
            error = self._sender_errors.get(src)
        if error is not None:
            return create_failed(error)
        self.waits.add(waiting)
        return waiting.message

    def post_recv_buffer(self, src: int, tag: Tag, buffer: Tensor) -> None:
        """Posts a receive buffer; see :meth:`farflung.types.Communicator.post_recv_buffer`."""
        if self.ended.error is None and buffer.device.type == "cpu" and buffer.is_contiguous():
            self._recv_buffers[src, tag] = buffer.detach().view(-1).view(torch.uint8)

    def find_recv_buffer(self, src: int, tag: Tag, view: int, nbytes: int) -> Tensor | None:
        """Finds the posted receive buffer of a message of ``nbytes`` bytes."""
        into = self._recv_buffers.get((src, tag)) if view == self.view else None
        return into if into is not None and into.nbytes == nbytes else None

    def deliver(self, src: int, tag: Tag, payload: Payload, view: int = 0) -> None:
        """Matches a message to its wait, or stores it; sets one of a newer view aside, and drops one of an older view.

        Raises:
          MailboxFull: more than :data:`MAX_FUTURE_NBYTES` bytes of messages of newer views.
        """
        if view < self.view and not is_control_plane(tag.exchange):
            self.num_dropped += 1
            return
        if view > self.view and not is_control_plane(tag.exchange):
            if (
                sum(message.nbytes for *_, message in self._future_messages) + payload.nbytes
                > MAX_FUTURE_NBYTES
            ):
                raise MailboxFull(f"more than {MAX_FUTURE_NBYTES} bytes of newer views")
            self._future_messages.append((view, src, tag, payload))
            return
        self._recv_buffers.pop((src, tag), None)
        waiting = self.waits.pop(src, tag)
        if waiting is not None:
            waiting.complete(src, payload)
        elif tag.exchange in self._cancelled:
            self.num_dropped += 1
        else:
            self._store(src, tag, payload)

    # --- unreceived messages --------------------------------------------------------------------------------------

    @property
    def unreceived_nbytes(self) -> int:
        """Bytes of all unreceived messages."""
        return self._stored_nbytes.total()

    def _store(self, src: int, tag: Tag, payload: Payload) -> None:
        stored_nbytes = self._stored_nbytes[src] + payload.nbytes + _ENTRY_OVERHEAD_NBYTES
        if self._stored_nbytes[src] and stored_nbytes > self._max_unreceived_nbytes:
            self.num_dropped += 1
            return
        self._stored_nbytes[src] = stored_nbytes
        self._num_stored += 1
        self._stored.setdefault(tag, {}).setdefault(src, []).append((self._num_stored, payload))

    def _pop_message(self, src: int, tag: Tag) -> Payload:
        """Removes the oldest stored message of a sender."""
        senders = self._stored[tag]
        _, payload = senders[src].pop(0)
        if not senders[src]:
            del senders[src]
        if not senders:
            del self._stored[tag]
        self._stored_nbytes[src] -= payload.nbytes + _ENTRY_OVERHEAD_NBYTES
        return payload

    def _drop(self, tag: Tag) -> None:
        """Drops the stored messages of a tag."""
        for src, messages in list(self._stored[tag].items()):
            self.num_dropped += len(messages)
            for _ in range(len(messages)):
                self._pop_message(src, tag)

    # --- the end --------------------------------------------------------------------------------------------------

    def cancel_exchange(self, exchange: int) -> None:
        """Cancels an exchange: ends its waits, and drops its messages, present and later."""
        self._cancelled.add(exchange)
        for waiting in self.waits:
            if waiting.tag.exchange == exchange:
                self.waits.fail(waiting, WaitEnded(waiting.src, waiting.description))
        for key in [key for key in self._recv_buffers if key[1].exchange == exchange]:
            del self._recv_buffers[key]
        for tag in [tag for tag in self._stored if tag.exchange == exchange]:
            self._drop(tag)

    def advance_view(self, view: int) -> None:
        """Replaces the view by a newer one: ends all waits and drops the messages of older views.

        Messages of the agreement on views stay.

        Raises:
          ValueError: ``view`` is not newer.
        """
        if view <= self.view:
            raise ValueError(f"view {view} is not newer than {self.view}")
        for waiting in self.waits:
            if not is_control_plane(waiting.tag.exchange):
                self.waits.fail(waiting, WaitEnded(waiting.src, waiting.description))
        for tag in [tag for tag in self._stored if not is_control_plane(tag.exchange)]:
            self._drop(tag)
        self._recv_buffers.clear()
        self.view, messages, self._future_messages = view, self._future_messages, []
        for number, src, tag, payload in messages:
            self.deliver(src, tag, payload, number)

    def fail_from(self, src: int, error: BaseException) -> None:
        """Fails all waits for one sender, pending and later; its stored messages can still be received."""
        if src in self._sender_errors:
            return
        self._sender_errors[src] = error
        for waiting in self.waits:
            if waiting.src == src:
                self.waits.fail(waiting, error)
        self.departures.put(src)

    def admit_sender(self, src: int) -> None:
        """Admits a sender, perhaps again; undoes :meth:`fail_from`."""
        self._sender_errors.pop(src, None)
        self.arrivals.put(src)

    def end(self, error: BaseException) -> None:
        """Fails all waits, pending and later; stored messages can still be received. The first error stays."""
        error = self.ended.error or error
        self.ended.set_exception(error)
        self._recv_buffers.clear()
        for waiting in self.waits:
            self.waits.fail(waiting, error)
        for queue in (self.arrivals, self.departures):
            queue.end(error)


def check_expected(payload: Payload, expect: tuple[TensorSpec, ...], src: int, description: str) -> None:
    """Checks the types and shapes of a received message's tensors.

    Args:
      payload: Payload of the message.
      expect: Expected dtypes and shapes of its tensors.
      src: Rank of the sender.
      description: Purpose of the message, for the error.

    Raises:
      ProtocolError: its tensors differ.
    """
    specs = tuple(TensorSpec.from_tensor(tensor) for tensor in payload.iter_tensors())
    if specs != expect:
        raise ProtocolError(
            f"rank {src} sent {_format_specs(specs)} for {description} where {_format_specs(expect)} was due: "
            f"do all ranks run the same "
            "model and recipe?"
        )


def _format_specs(specs: tuple[TensorSpec, ...]) -> str:
    return (
        " + ".join(f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}" for spec in specs)
        or "nothing"
    )


# --- events and cancelled exchanges ---------------------------------------------------------------------------------


class EventQueue:
    """Queue of ranks with at most one waiter.

    Args:
      event: Name of the event, for errors.
    """

    def __init__(self, event: str) -> None:
        self._event = event
        self._ranks: deque[int] = deque()
        self._wait: Pending[int] | None = None
        self._end_error: BaseException | None = None

    def put(self, rank: int) -> None:
        """Adds a rank, or passes it to the waiter."""
        wait, self._wait = self._wait, None
        if wait is None:
            self._ranks.append(rank)
        else:
            wait.set_result(rank)

    def get(self) -> Pending[int]:
        """Waits for the next rank.

        Raises:
          RuntimeError: there is a waiter already.
        """
        if self._ranks:
            return create_completed(self._ranks.popleft())
        if self._end_error is not None:
            return create_failed(self._end_error)
        if self._wait is not None:
            raise RuntimeError(f"two waits for {self._event}")
        self._wait = Pending()
        return self._wait

    def end(self, error: BaseException) -> None:
        """Fails the wait, and each later one once the queue is empty."""
        self._end_error = error
        wait, self._wait = self._wait, None
        if wait is not None:
            wait.set_exception(error)


class IntervalSet:
    """Growing set of integers, stored as runs of consecutive ones.

    Exchanges of one purpose are numbered by step. If each is cancelled after its end, there is one run for each
    purpose, however long the training takes.

    >>> cancelled = IntervalSet()
    >>> for number in (7, 3, 5, 4, 5):
    ...     cancelled.add(number)
    >>> [number for number in range(10) if number in cancelled], len(cancelled)
    ([3, 4, 5, 7], 2)
    """

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        """Last number of each run, plus one."""

    def __len__(self) -> int:
        """Returns the number of runs."""
        return len(self._begins)

    def __contains__(self, number: int) -> bool:
        index = bisect_right(self._begins, number) - 1
        return index >= 0 and number < self._ends[index]

    def add(self, number: int) -> None:
        if number in self:
            return
        index = bisect_right(self._begins, number)
        is_after = index > 0 and self._ends[index - 1] == number
        is_before = index < len(self._begins) and self._begins[index] == number + 1
        if is_after and is_before:
            self._ends[index - 1] = self._ends.pop(index)
            del self._begins[index]
        elif is_after:
            self._ends[index - 1] += 1
        elif is_before:
            self._begins[index] = number
        else:
            self._begins.insert(index, number)
            self._ends.insert(index, number + 1)
