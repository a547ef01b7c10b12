"""Matches arrivals to waits by source and tag, whichever comes first."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from typing import Any, NamedTuple

import torch
from torch import Tensor

from farflung.comm.channel import in_words
from farflung.errors import DeadlinePassed, ProtocolError, WaitEnded
from farflung.tasks import Pending, done, failed
from farflung.types import Payload, Tag, TensorSpec

__all__ = ["KEPT_NBYTES", "Cancelled", "Full", "Mailbox", "Waiting"]


AHEAD_NBYTES = 1 << 30
"""Bytes of messages of newer views that are kept, at most."""
KEPT_NBYTES = 1 << 28
"""Bytes that are kept of a sender who need not be trusted, see :class:`Mailbox`."""
_ENTRY_NBYTES = 1 << 10
"""What keeping a message takes beside its tensors."""


class Full(Exception):
    """There is no room for a message."""


class Waiting(NamedTuple):
    """One receive on its way: who is waited for, for what, since when.

    Args:
      src: who; ``None``: whoever is first.
      tag: of the message.
      since: when the wait began, in seconds.
      expect: what its tensors have to be like.
      found: the message; with who has sent it, where that could be anybody.
    """

    src: int | None
    tag: Tag
    since: float
    expect: tuple[TensorSpec, ...] | None
    found: Pending[Any]

    @property
    def what(self) -> str:
        return in_words(self.tag)


class Mailbox:
    """The receiving half of a communicator. Not thread-safe: it belongs to its driver's thread.

    Args:
      kept_nbytes: of each sender, how much is kept that nobody waits for yet; one message always is.
    """

    def __init__(self, kept_nbytes: float = math.inf) -> None:
        self._kept_nbytes = kept_nbytes
        self._kept: Counter[int] = Counter()
        """Bytes that are kept, by sender."""
        self._waits: dict[tuple[int | None, Tag], Waiting] = {}
        """Those that count against the deadline of the run, in the order in which they began."""
        self._apart: dict[tuple[int | None, Tag], tuple[Waiting, float]] = {}
        """Those with a deadline of their own, and when that is over."""
        self._arrived: dict[Tag, dict[int, list[tuple[int, Payload]]]] = {}
        """What is kept, by tag and sender: numbered in the order of arrival, and messages."""
        self._came = 0
        """Messages that were kept so far."""
        self._places: dict[tuple[int, Tag], Tensor] = {}
        """Where messages to come may be put."""
        self._cancelled = Cancelled()
        self._ended: BaseException | None = None
        self._gone: dict[int, BaseException] = {}
        self.arrivals, self.departures = EventQueue("an arrival"), EventQueue("a departure")
        """Senders that came after the first meeting, see :meth:`welcome`, and those that are gone."""
        self.view = 0
        """The number of the view whose messages are received."""
        self._ahead: list[tuple[int, int, Tag, Payload]] = []
        """Of newer views: number, sender, tag, message."""
        self.dropped = 0
        """Messages of exchanges that were forgotten, of older views, and of who has sent more than is kept."""

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
        """See :meth:`farflung.types.Communicator.land`."""
        if self._ended is None and into.device.type == "cpu" and into.is_contiguous():
            self._places[src, tag] = into.detach().view(-1).view(torch.uint8)

    def place(self, src: int, tag: Tag, view: int, nbytes: int) -> Tensor | None:
        """Finds the memory that was named for a message under way, where that has so many bytes."""
        into = self._places.get((src, tag)) if view == self.view else None
        return into if into is not None and into.nbytes == nbytes else None

    def _wait(self, waiting: Waiting, deadline_s: float | None) -> Pending[Any]:
        found, key = self._kept_for(waiting), (waiting.src, waiting.tag)
        if found is not None:
            self._lets_go(*found)
            _hand_over(waiting, *found)
            return waiting.found
        ended = self._ended
        if ended is None and waiting.tag.exchange in self._cancelled:
            ended = WaitEnded(waiting.src, waiting.what)
        if ended is None and waiting.src is not None:
            ended = self._gone.get(waiting.src)
        if ended is not None:
            return failed(ended)
        if key in self._waits or key in self._apart:
            raise RuntimeError(f"two receives for {waiting.what} from {waiting.src}")
        if deadline_s is None:
            self._waits[key] = waiting
        else:
            self._apart[key] = waiting, waiting.since + deadline_s
        return waiting.found

    def _kept_for(self, waiting: Waiting) -> tuple[int, Payload] | None:
        """Takes out the sender and the message that a wait is for, where it is there."""
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
        """A message has come; one of a newer view is kept for that, one of an older dropped.

        Raises:
          Full: there is no room for more of newer views.
        """
        if view < self.view:
            self.dropped += 1
            return
        if view > self.view:
            if sum(one.nbytes for *_, one in self._ahead) + payload.nbytes > AHEAD_NBYTES:
                raise Full(f"more than {AHEAD_NBYTES} bytes of views to come")
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
        kept = self._kept[src] + payload.nbytes + _ENTRY_NBYTES
        if self._kept[src] and kept > self._kept_nbytes:
            self.dropped += 1
            return
        self._kept[src] = kept
        self._came += 1
        self._arrived.setdefault(tag, {}).setdefault(src, []).append((self._came, payload))

    @property
    def kept_nbytes(self) -> int:
        """What is kept that nobody waits for yet."""
        return self._kept.total()

    def _lets_go(self, src: int, payload: Payload) -> None:
        self._kept[src] -= payload.nbytes + _ENTRY_NBYTES

    def _take(self, key: tuple[int | None, Tag]) -> Waiting | None:
        waiting = self._waits.pop(key, None)
        return waiting if waiting is not None else self._apart.pop(key, (None, 0.0))[0]

    # --- how long -------------------------------------------------------------------------------------------------

    def oldest(self) -> Waiting | None:
        """The wait that began first, of those that count against the deadline of the run."""
        return next(iter(self._waits.values()), None)

    def any_wait(self) -> Waiting | None:
        """The oldest, or else one with a deadline of its own."""
        return next(iter(self._all()), None)

    def next_due(self) -> float | None:
        """When the next deadline of a wait's own is over; ``None``: there is none."""
        return min((due for _, due in self._apart.values() if due < math.inf), default=None)

    def fail(self, waiting: Waiting, error: BaseException) -> None:
        self._take((waiting.src, waiting.tag))
        waiting.found.fail(error)

    def fail_due(self, now: float) -> None:
        """Fails each wait whose own deadline is over, and it alone."""
        for waiting in [waiting for waiting, due in self._apart.values() if due <= now]:
            self.fail(waiting, DeadlinePassed(waiting.src, waiting.what, now - waiting.since))

    # --- the end --------------------------------------------------------------------------------------------------

    def forget(self, exchange: int) -> None:
        """Ends every wait of an exchange, and drops its messages, now and from now on."""
        self._cancelled.add(exchange)
        for waiting in [one for one in self._all() if one.tag.exchange == exchange]:
            self.fail(waiting, WaitEnded(waiting.src, waiting.what))
        for key in [key for key in self._places if key[1].exchange == exchange]:
            del self._places[key]
        for tag in [tag for tag in self._arrived if tag.exchange == exchange]:
            for src, kept in self._arrived.pop(tag).items():
                self.dropped += len(kept)
                for _, payload in kept:
                    self._lets_go(src, payload)

    def advance(self, view: int) -> None:
        """From now on messages of a newer view are received: waits end, what has come of an older one is dropped.

        Raises:
          ValueError: it is not newer.
        """
        if view <= self.view:
            raise ValueError(f"view {view} is not newer than {self.view}")
        for waiting in self._all():
            self.fail(waiting, WaitEnded(waiting.src, waiting.what))
        self.dropped += sum(len(kept) for senders in self._arrived.values() for kept in senders.values())
        self._arrived.clear()
        self._places.clear()
        self._kept.clear()
        self.view, ahead, self._ahead = view, self._ahead, []
        for number, src, tag, payload in ahead:
            self.deliver(src, tag, payload, number)

    def fail_from(self, src: int, error: BaseException) -> None:
        """Fails every wait for one sender, now and from now on; what it has sent can still be received."""
        if src in self._gone:
            return
        self._gone[src] = error
        for waiting in [one for one in self._all() if one.src == src]:
            self.fail(waiting, error)
        self.departures.tell(src)

    def welcome(self, src: int) -> None:
        """A sender has come in, for the first time or again: undoes :meth:`fail_from`, so waits for it wait again."""
        self._gone.pop(src, None)
        self.arrivals.tell(src)

    def end(self, error: BaseException) -> None:
        """Fails every wait, now and from now on; what has arrived can still be received."""
        if self._ended is None:
            self._ended = error
        self._places.clear()
        for waiting in self._all():
            self.fail(waiting, self._ended)
        for news in (self.arrivals, self.departures):
            news.end(self._ended)

    def _all(self) -> list[Waiting]:
        return [*self._waits.values(), *(waiting for waiting, _ in self._apart.values())]


def _hand_over(waiting: Waiting, src: int, payload: Payload) -> None:
    if waiting.expect is not None:
        found = tuple(TensorSpec.of(tensor) for tensor in payload.tensors())
        if found != waiting.expect:
            waiting.found.fail(
                ProtocolError(
                    f"rank {src} sent {_describe(found)} for {waiting.what} where {_describe(waiting.expect)} was "
                    "due: do all ranks run the same model and recipe?"
                )
            )
            return
    waiting.found.set((src, payload) if waiting.src is None else payload)


def _describe(specs: tuple[TensorSpec, ...]) -> str:
    return (
        " + ".join(f"{str(spec.dtype).removeprefix('torch.')}{list(spec.shape)}" for spec in specs)
        or "nothing"
    )


# --- what a mailbox keeps beside messages ---------------------------------------------------------------------------


class EventQueue:
    """Ranks of which one waiter is told, each once and in their order.

    Args:
      what: they have done, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._untold: deque[int] = deque()
        self._wait: Pending[int] | None = None
        self._ended: BaseException | None = None

    def tell(self, rank: int) -> None:
        """Something has happened to a rank."""
        wait, self._wait = self._wait, None
        if wait is None:
            self._untold.append(rank)
        else:
            wait.set(rank)

    def next(self) -> Pending[int]:
        """The next rank that nobody was told of."""
        if self._untold:
            return done(self._untold.popleft())
        if self._ended is not None:
            return failed(self._ended)
        if self._wait is not None:
            raise RuntimeError(f"two waits for {self._what}")
        self._wait = Pending()
        return self._wait

    def end(self, error: BaseException) -> None:
        """Nothing more will happen; what has can still be told."""
        self._ended = error
        wait, self._wait = self._wait, None
        if wait is not None:
            wait.fail(error)


class Cancelled:
    """A set of numbers that only grows, kept as runs of consecutive ones.

    Exchanges of one purpose are numbered by step. Where each is cancelled once it is through, whatever has come of it,
    there is one run for each purpose, however long the training goes on.

    >>> cancelled = Cancelled()
    >>> for number in (7, 3, 5, 4, 5):
    ...     cancelled.add(number)
    >>> [number for number in range(10) if number in cancelled], len(cancelled)
    ([3, 4, 5, 7], 2)
    """

    def __init__(self) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        """Behind the last number of each run."""

    def __len__(self) -> int:
        """How many runs there are."""
        return len(self._begins)

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._begins, number) - 1
        return at >= 0 and number < self._ends[at]

    def add(self, number: int) -> None:
        if number in self:
            return
        at = bisect_right(self._begins, number)
        extends = at > 0 and self._ends[at - 1] == number
        meets = at < len(self._begins) and self._begins[at] == number + 1
        if extends and meets:
            self._ends[at - 1] = self._ends.pop(at)
            del self._begins[at]
        elif extends:
            self._ends[at - 1] += 1
        elif meets:
            self._begins[at] = number
        else:
            self._begins.insert(at, number)
            self._ends.insert(at, number + 1)
