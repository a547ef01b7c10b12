"""What a modelled device computes for exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from farflung.comm.virtual.clock import Clock
from farflung.comm.wire import PIECE
from farflung.devices import CodingRates
from farflung.tasks import Pending, done
from farflung.types import CodingCost

__all__ = ["Ends", "Lane"]

ROUNDING_S = 1e-9
"""What sums of seconds may differ by; work that is closer to its end is through."""


class Lane:
    """Two processors beside the one that trains, as a replica on the wall clock has them; see
    :class:`farflung.types.CodingLane`.

    The *communication thread* codes, adds, and takes a fixed time for each message that it sends or receives: one
    piece of work after the other, in the order they were asked for. So what is sent leaves, what is received is
    heard and what is computed is there once all that was asked for before is through.

    The transport's *I/O thread* copies and encrypts, byte by byte and beside it, and serves its connections in turn, a
    piece of 128 KiB of each: a message sets out once its own first piece is ready, while the others follow, and its
    last piece leaves once all is ready that the thread was asked for before. At the receiver all but the last piece is
    worked on while the rest is on its way.

    Left out: that the threads share memory and its bandwidth, and that a system with few processors does not serve a
    thread at once.

    Args:
      rates: of the device.
      encrypted: whether messages are.
      slowdown: how many times as long everything takes now.
      now: seconds for which the device has been running.
      at: calls something when :attr:`now` is so much, and never if the device crashes before.
    """

    def __init__(
        self,
        rates: CodingRates,
        *,
        encrypted: bool,
        slowdown: Callable[[], float],
        now: Callable[[], float],
        at: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._rates, self._slowdown, self._now, self._running_at = rates, slowdown, now, at
        self._byte_s = rates.copy_s_per_byte + (rates.encrypt_s_per_byte if encrypted else 0.0)
        self._coded_at, self._coding_s = 0.0, 0.0
        """When the communication thread is through with all it was asked for, and how long that takes in all."""
        self._first_at, self._moved_at, self._moving_s = 0.0, 0.0, 0.0
        """The same of the I/O thread; before them, when it is through with the first piece of each message."""
        self.not_charged: dict[str, None] = {}
        """The methods for some of whose work there is no rate, in the order in which they came."""

    @property
    def busy_s(self) -> float:
        """For how long the two threads work in all, for what they were asked for so far."""
        return self._coding_s + self._moving_s

    def charge(self, cost: CodingCost) -> None:
        """Takes a piece of coding on, behind all that was asked for before."""
        if (cost.operation, cost.method) not in self._rates.operations:
            self.not_charged[cost.method] = None
        self._take(self._rates.seconds(cost))

    def through(self) -> Pending[None]:
        """Done when all that was asked for so far is."""
        if self._coded_at <= self._now():
            return done(None)
        through: Pending[None] = Pending()
        self._at(self._coded_at, partial(through.set, None))
        return through

    def send(self, nbytes: int, leave: Callable[[float], None], count: int = 1) -> None:
        """Messages are sent, one after the other.

        Args:
          nbytes: of each.
          leave: called when the first piece of the first is ready, with the seconds after which the last of all is.
          count: how many.
        """
        each_s = self._take(self._rates.message_s, count)
        rest_s = (count - 1) * each_s
        self._at(self._coded_at - rest_s, partial(self._move, nbytes, count, rest_s, leave))

    def _move(self, nbytes: int, count: int, rest_s: float, leave: Callable[[float], None]) -> None:
        if not self._byte_s:
            leave(rest_s)
            return
        now, byte_s = self._now(), self._byte_s * self._slowdown()
        self._first_at = max(self._first_at, now) + byte_s * min(nbytes, PIECE)
        moved_at = self._moved_at = max(self._moved_at, now) + byte_s * nbytes * count
        self._moving_s += byte_s * nbytes * count
        last = max(moved_at, self._first_at + rest_s)
        self._at(self._first_at, lambda: leave(last - self._now()))

    def receive(self, nbytes: int, since_s: float, deliver: Callable[[], None], count: int = 1) -> None:
        """The last byte of a message is there, or of the last of several.

        Args:
          nbytes: of each.
          since_s: how long ago the first could have been.
          deliver: called when they can be used.
          count: how many.
        """
        now = through = self._now()
        if self._byte_s:
            byte_s = self._byte_s * self._slowdown()
            self._moved_at = max(self._moved_at, now - since_s) + byte_s * nbytes * count
            self._moving_s += byte_s * nbytes * count
            through = max(self._moved_at, now + byte_s * min(nbytes, PIECE))
        self._at(through, partial(self._hear, count, since_s, deliver))

    def _hear(self, count: int, since_s: float, deliver: Callable[[], None]) -> None:
        if count > 1:
            self._take(self._rates.message_s, count - 1, since_s)
        self._take(self._rates.message_s)
        self._at(self._coded_at, deliver)

    def beside(self, seconds: float, fn: Callable[[], None]) -> None:
        """Calls ``fn`` when a processor has worked for ``seconds`` that stands still while either thread works."""
        ends, before = self._now() + seconds, self._worked_s()

        def look() -> None:
            due = ends + (self._worked_s() - before)
            if due <= self._now() + ROUNDING_S:
                fn()
            else:
                self._running_at(due + self._ahead_s(), look)

        self._running_at(ends + self._ahead_s(), look)

    def _ahead_s(self) -> float:
        """For how long the threads will work, as far as is known."""
        now = self._now()
        return max(self._coded_at - now, 0.0) + max(self._moved_at - now, 0.0)

    def _worked_s(self) -> float:
        """For how long they have worked."""
        return self._coding_s + self._moving_s - self._ahead_s()

    def _take(self, seconds: float, count: int = 1, since_s: float = 0.0) -> float:
        """So many pieces of work; how long each takes."""
        if seconds:
            seconds *= self._slowdown()
            self._coded_at = max(self._coded_at, self._now() - since_s) + count * seconds
            self._coding_s += count * seconds
        return seconds

    def _at(self, t: float, fn: Callable[[], None]) -> None:
        if t <= self._now():
            fn()
        else:
            self._running_at(t, fn)


@dataclass(frozen=True, slots=True)
class Ends:
    """The devices at both ends of a message; of several of one size where they stand for groups of devices.

    Args:
      sender: its lane, where it has one.
      receiver: likewise.
      sent: how many messages leave a sender.
      received: how many come to a receiver.
    """

    sender: Lane | None
    receiver: Lane | None
    sent: int = 1
    received: int = 1

    def carry(
        self,
        clock: Clock,
        nbytes: int,
        least_s: float,
        move: Callable[[Callable[[float], None]], None],
        arrived: Callable[[float], None],
    ) -> None:
        """Takes a message from one to the other.

        Args:
          clock: virtual time.
          nbytes: of each.
          least_s: the shortest delay of the link.
          move: puts it on the network; is given what to call when it is there.
          arrived: called when it is heard, with the time.
        """

        def leave(rest_s: float) -> None:
            begins = clock.now() + least_s
            ready = begins + rest_s

            def came(t: float) -> None:
                if t < ready:
                    clock.at(ready, lambda: come(ready))
                else:
                    come(t)

            def come(t: float) -> None:
                if self.receiver is None:
                    arrived(t)
                else:
                    self.receiver.receive(nbytes, t - begins, lambda: arrived(clock.now()), self.received)

            move(came)

        if self.sender is None:
            leave(0.0)
        else:
            self.sender.send(nbytes, leave, self.sent)
