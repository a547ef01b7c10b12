"""Mailbox: matches messages to pending receives by sender and tag."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farflung.comm.channel import describe, of_no_view
from farflung.errors import DeadlinePassed, ProtocolError, WaitEnded
from farflung.tasks import Pending, done, failed
from farflung.types import Payload, Tag, TensorSpec

__all__ = ["KEPT_NBYTES", "QUESTIONS", "Cancelled", "Full", "Mailbox", "Waiting", "check_expected"]


AHEAD_NBYTES = 1 << 30
"""Most stored bytes of messages of newer views."""
KEPT_NBYTES = 1 << 28
"""Most stored bytes of each untrusted sender, see :class:`Mailbox`."""
QUESTIONS = 4
"""Number of probes for signs of life in each deadline, while a wait lasts."""
_ENTRY_NBYTES = 1 << 10
"""Bytes of a stored message besides its tensors."""


class Full(Exception):
    """Error of a message that exceeds the mailbox's limit."""


class Waiting(NamedTuple):
    """A pending receive.

    Args:
      src: Rank of the sender; None for any rank.
      tag: Tag of the message.
      start_s: Time at which the wait began, in seconds.
      expect: Expected dtypes and shapes of the message's tensors; None for any.
      message: The message, or a tuple of sender and message if ``src`` is None.
    """

    src: int | None
    tag: Tag
    since: float
    expect: tuple[TensorSpec, ...] | None
    found: Pending[Any]

    @property
    def what(self) -> str:
        return describe(self.tag)


class Mailbox:
    """Receiving half of a communicator. Not thread-safe: it belongs to its driver's thread.

    Args:
      max_unreceived_nbytes: Most bytes of unreceived messages stored for each sender; one message always is.
    """

    def __init__(self, kept_nbytes: float = math.inf) -> None:
        self._kept_nbytes = kept_nbytes
        self._kept: Counter[int] = Counter()
        """Bytes of unreceived messages, by sender."""
        self._waits: dict[tuple[int | None, Tag], Waiting] = {}
        """Waits under the run's deadline, oldest first."""
        self._timed: dict[tuple[int | None, Tag], tuple[Waiting, float]] = {}
        """Waits with a deadline of their own, and the time at which it passes, in seconds."""
        self._arrived: dict[Tag, dict[int, list[tuple[int, Payload]]]] = {}
        """Unreceived messages by tag and sender, each with its number in order of arrival."""
        self._came = 0
        """Number of messages stored so far."""
        self._places: dict[tuple[int, Tag], Tensor] = {}
        """Memory that messages may be received into."""
        self._cancelled = Cancelled()
        self._ended: BaseException | None = None
        self._gone: dict[int, BaseException] = {}
        self.arrivals, self.departures = EventQueue("an arrival"), EventQueue("a departure")
        """Members that were admitted, see :meth:`admit_sender`, and those that have left or were lost."""
        self.view = 0
        """Number of the view whose messages are received."""
        self._ahead: list[tuple[int, int, Tag, Payload]] = []
        """Messages of newer views: number of the view, sender, tag and message."""
        self.dropped = 0
        """Number of dropped messages: of cancelled exchanges, of older views, and beyond the limit of bytes."""

    # --- receiving ------------------------------------------------------------------------------------------------

    def recv(
        self,
        src: int,
        tag: Tag,
        expect: tuple[TensorSpec, ...] | None,
        now: float,
        deadline_s: float | None = None,
    ) -> Pending[Payload]:
        return self._wait(Waiting(src, tag, now, expect, Pending()), deadline_s)

    def recv_any(
        self,
        tag: Tag,
        expect: tuple[TensorSpec, ...] | None,
        now: float,
        deadline_s: float | None = None,
    ) -> Pending[tuple[int, Payload]]:
        return self._wait(Waiting(None, tag, now, expect, Pending()), deadline_s)

    def land(self, src: int, tag: Tag, into: Tensor) -> None:
        """Posts a receive buffer; see :meth:`farflung.types.Communicator.post_recv_buffer`."""
        if self._ended is None and into.device.type == "cpu" and into.is_contiguous():
            self._places[src, tag] = into.detach().view(-1).view(torch.uint8)

    def place(self, src: int, tag: Tag, view: int, nbytes: int) -> Tensor | None:
        """Finds the posted receive buffer of a message of ``nbytes`` bytes."""
        into = self._places.get((src, tag)) if view == self.view else None
        return into if into is not None and into.nbytes == nbytes else None

    def _wait(self, waiting: Waiting, deadline_s: float | None) -> Pending[Any]:
        message, key = self._kept_for(waiting), (waiting.src, waiting.tag)
        if message is not None:
            self._lets_go(*message)
            _hand_over(waiting, *message)
            return waiting.found
        error = self._ended
        if error is None and waiting.tag.exchange in self._cancelled:
            error = WaitEnded(waiting.src, waiting.what)
        if error is None and waiting.src is not None:
            error = self._gone.get(waiting.src)
        if error is not None:
            return failed(error)
        if key in self._waits or key in self._timed:
            raise RuntimeError(f"two receives for {waiting.what} from {waiting.src}")
        if deadline_s is None:
            self._waits[key] = waiting
        else:
            self._timed[key] = waiting, waiting.since + deadline_s
        return waiting.found

    def _kept_for(self, waiting: Waiting) -> tuple[int, Payload] | None:
        """Removes the stored message that matches a wait; returns its sender and itself."""
        senders, src = self._arrived.get(waiting.tag, {}), waiting.src
        if src is None:
            src = min(senders, key=lambda sender: senders[sender][0][0], default=None)
        if src is None or src not in senders:
            return None
        _, payload = senders[src].pop(0)
        if not senders[src]:
            del senders[src]
        if not senders:
            del self._arrived[waiting.tag]
        return src, payload

    def deliver(self, src: int, tag: Tag, payload: Payload, view: int = 0) -> None:
        """Matches a message to its wait, or stores it; sets one of a newer view aside, and drops one of an older view.

        Raises:
          Full: more than :data:`MAX_FUTURE_NBYTES` bytes of messages of newer views.
        """
        if view < self.view and not of_no_view(tag.exchange):
            self.dropped += 1
            return
        if view > self.view and not of_no_view(tag.exchange):
            if sum(message.nbytes for *_, message in self._ahead) + payload.nbytes > AHEAD_NBYTES:
                raise Full(f"more than {AHEAD_NBYTES} bytes of newer views")
            self._ahead.append((view, src, tag, payload))
            return
        self._places.pop((src, tag), None)
        waiting = self._take((src, tag)) or self._take((None, tag))
        if waiting is not None:
            _hand_over(waiting, src, payload)
        elif tag.exchange in self._cancelled:
            self.dropped += 1
        else:
            self._keep(src, tag, payload)

    def _keep(self, src: int, tag: Tag, payload: Payload) -> None:
        stored_nbytes = self._kept[src] + payload.nbytes + _ENTRY_NBYTES
        if self._kept[src] and stored_nbytes > self._kept_nbytes:
            self.dropped += 1
            return
        self._kept[src] = stored_nbytes
        self._came += 1
        self._arrived.setdefault(tag, {}).setdefault(src, []).append((self._came, payload))

    @property
    def kept_nbytes(self) -> int:
        """Bytes of all unreceived messages."""
        return self._kept.total()

    def _lets_go(self, src: int, payload: Payload) -> None:
        self._kept[src] -= payload.nbytes + _ENTRY_NBYTES

    def _take(self, key: tuple[int | None, Tag]) -> Waiting | None:
        waiting = self._waits.pop(key, None)
        return waiting if waiting is not None else self._timed.pop(key, (None, 0.0))[0]

    # --- deadlines ------------------------------------------------------------------------------------------------

    def oldest(self) -> Waiting | None:
        """Returns the oldest wait under the run's deadline."""
        return next(iter(self._waits.values()), None)

    def any_wait(self) -> Waiting | None:
        """Returns the oldest wait under the run's deadline, or else a timed one, preferably for a single rank."""
        timed = (waiting for waiting, _ in self._timed.values())
        return self.oldest() or min(timed, key=lambda waiting: waiting.src is None, default=None)

    def next_due(self) -> float | None:
        """Returns the earliest deadline of the timed waits, in seconds; None if there is none."""
        return min((due for _, due in self._timed.values() if due < math.inf), default=None)

    def fail(self, waiting: Waiting, error: BaseException) -> None:
        self._take((waiting.src, waiting.tag))
        waiting.found.fail(error)

    def fail_due(self, now: float) -> None:
        """Fails the timed waits whose deadline has passed, with :class:`farflung.errors.DeadlinePassed`."""
        for waiting in [waiting for waiting, deadline_s in self._timed.values() if deadline_s <= now]:
            self.fail(waiting, DeadlinePassed(waiting.src, waiting.what, now - waiting.since))

    # --- the end --------------------------------------------------------------------------------------------------

    def forget(self, exchange: int) -> None:
        """Cancels an exchange: ends its waits, and drops its messages, present and later."""
        self._cancelled.add(exchange)
        for waiting in [wait for wait in self._all() if wait.tag.exchange == exchange]:
            self.fail(waiting, WaitEnded(waiting.src, waiting.what))
        for key in [key for key in self._places if key[1].exchange == exchange]:
            del self._places[key]
        for tag in [tag for tag in self._arrived if tag.exchange == exchange]:
            self._drop(tag)

    def _drop(self, tag: Tag) -> None:
        """Drops the stored messages of a tag."""
        for src, messages in self._arrived.pop(tag).items():
            self.dropped += len(messages)
            for _, payload in messages:
                self._lets_go(src, payload)

    def advance(self, view: int) -> None:
        """Replaces the view by a newer one: ends all waits and drops the messages of older views.

        Messages of the agreement on views stay.

        Raises:
          ValueError: ``view`` is not newer.
        """
        if view <= self.view:
            raise ValueError(f"view {view} is not newer than {self.view}")
        for waiting in self._all():
            if not of_no_view(waiting.tag.exchange):
                self.fail(waiting, WaitEnded(waiting.src, waiting.what))
        for tag in [tag for tag in self._arrived if not of_no_view(tag.exchange)]:
            self._drop(tag)
        self._places.clear()
        self.view, messages, self._ahead = view, self._ahead, []
        for number, src, tag, payload in messages:
            self.deliver(src, tag, payload, number)

    def fail_from(self, src: int, error: BaseException) -> None:
        """Fails all waits for one sender, pending and later; its stored messages can still be received."""
        if src in self._gone:
            return
        self._gone[src] = error
        for waiting in [wait for wait in self._all() if wait.src == src]:
            self.fail(waiting, error)
        self.departures.tell(src)

    def welcome(self, src: int) -> None:
        """Admits a sender, perhaps again; undoes :meth:`fail_from`."""
        self._gone.pop(src, None)
        self.arrivals.tell(src)

    def end(self, error: BaseException) -> None:
        """Fails all waits, pending and later; stored messages can still be received."""
        if self._ended is None:
            self._ended = error
        self._places.clear()
        for waiting in self._all():
            self.fail(waiting, self._ended)
        for queue in (self.arrivals, self.departures):
            queue.end(self._ended)

    def _all(self) -> list[Waiting]:
        return [*self._waits.values(), *(waiting for waiting, _ in self._timed.values())]


def _hand_over(waiting: Waiting, src: int, payload: Payload) -> None:
    try:
        if waiting.expect is not None:
            check_expected(payload, waiting.expect, src, waiting.what)
    except ProtocolError as error:
        waiting.found.fail(error)
    else:
        waiting.found.set((src, payload) if waiting.src is None else payload)


def check_expected(payload: Payload, expect: tuple[TensorSpec, ...], src: int, what: str) -> None:
    """Checks the types and shapes of a received message's tensors.

    Args:
      payload: Payload of the message.
      expect: Expected dtypes and shapes of its tensors.
      src: Rank of the sender.
      description: Purpose of the message, for the error.

    Raises:
      ProtocolError: its tensors differ.
    """
    specs = tuple(TensorSpec.of(tensor) for tensor in payload.tensors())
    if specs != expect:
        raise ProtocolError(
            f"rank {src} sent {_in_text(specs)} for {what} where {_in_text(expect)} was due: do all ranks run the same "
            "model and recipe?"
        )


def _in_text(specs: tuple[TensorSpec, ...]) -> str:
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

    def __init__(self, what: str) -> None:
        self._what = what
        self._untold: deque[int] = deque()
        self._wait: Pending[int] | None = None
        self._ended: BaseException | None = None

    def tell(self, rank: int) -> None:
        """Adds a rank, or passes it to the waiter."""
        wait, self._wait = self._wait, None
        if wait is None:
            self._untold.append(rank)
        else:
            wait.set(rank)

    def next(self) -> Pending[int]:
        """Waits for the next rank.

        Raises:
          RuntimeError: there is a waiter already.
        """
        if self._untold:
            return done(self._untold.popleft())
        if self._ended is not None:
            return failed(self._ended)
        if self._wait is not None:
            raise RuntimeError(f"two waits for {self._what}")
        self._wait = Pending()
        return self._wait

    def end(self, error: BaseException) -> None:
        """Fails the wait, and each later one once the queue is empty."""
        self._ended = error
        wait, self._wait = self._wait, None
        if wait is not None:
            wait.fail(error)


class Cancelled:
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
