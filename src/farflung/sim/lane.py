"""What a modelled device computes for exchanges."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from farflung.comm.framing import MOST_PIECE_NBYTES
from farflung.devices import CodingRates
from farflung.tasks import Pending, done
from farflung.types import CodingCost

__all__ = ["Lane"]

ROUNDING_S = 1e-9
"""What sums of seconds may differ by; work that is closer to its end is through."""


class Lane:
    """The communication thread of a modelled device, beside the processor that trains; see
    :class:`farflung.types.CodingLane`.

    The thread codes, adds, takes a fixed time for each message that it sends or receives, and copies and encrypts
    their bytes: one piece of work after the other, in the order they were asked for. A message sets out once its first
    256 KiB are ready, while the others follow. At the receiver all but the last 256 KiB are worked on while the rest
    is on its way.

    Left out: that processors share memory and its bandwidth, that a system with few processors does not serve a
    thread at once, and that the thread codes between two pieces of a message.

    Args:
      rates: of the device.
      encrypted: whether messages are.
      slowdown: how many times as long everything takes now.
      now: seconds for which the device has been running.
      at: calls something when ``now`` is so much, and never if the device crashes before.
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
        self._through_at = 0.0
        """When the thread is through with all it was asked for."""
        self.busy_s = 0.0
        """For how long the thread works in all, for what it was asked for so far."""
        self.not_charged: dict[str, None] = {}
        """The methods for some of whose work there is no rate, in the order in which they came."""

    def charge(self, cost: CodingCost) -> None:
        """Takes a piece of coding on, behind all that was asked for before."""
        if (cost.operation, cost.method) not in self._rates.operations:
            self.not_charged[cost.method] = None
        self._take(self._rates.seconds(cost))

    def through(self) -> Pending[None]:
        """Done when all that was asked for so far is."""
        if self._through_at <= self._now():
            return done(None)
        through: Pending[None] = Pending()
        self._at(self._through_at, partial(through.set, None))
        return through

    def send(self, nbytes: int, leave: Callable[[float], None]) -> None:
        """Sends a message of ``nbytes`` bytes.

        ``leave`` is called when its first piece is ready, with the seconds after which its last piece is.
        """
        piece_s, all_s = self._seconds(nbytes)
        self._take(piece_s)
        first_at = self._through_at
        self._take(all_s - piece_s)
        self._at(first_at, partial(leave, self._through_at - first_at))

    def receive(self, nbytes: int, since_s: float, deliver: Callable[[], None]) -> None:
        """Receives a message whose last byte has arrived.

        Args:
          nbytes: of the message.
          since_s: how long ago the first byte could have arrived.
          deliver: called when the message can be used.
        """
        piece_s, all_s = self._seconds(nbytes)
        self._take(all_s - piece_s, since_s)
        self._take(piece_s)
        self._at(self._through_at, deliver)

    def _seconds(self, nbytes: int) -> tuple[float, float]:
        """Returns the seconds that the first or last piece of a message takes, and those of the whole message."""
        message_s, byte_s = self._rates.message_s, self._byte_s
        piece_s = message_s + byte_s * min(nbytes, MOST_PIECE_NBYTES)
        return piece_s, message_s + byte_s * nbytes

    def beside(self, seconds: float, fn: Callable[[], None]) -> None:
        """Calls ``fn`` when a processor has worked for ``seconds`` that stands still while the thread works."""
        ends, before = self._now() + seconds, self._worked_s()

        def look() -> None:
            due = ends + (self._worked_s() - before)
            if due <= self._now() + ROUNDING_S:
                fn()
            else:
                self._running_at(due + self._ahead_s(), look)

        self._running_at(ends + self._ahead_s(), look)

    def _ahead_s(self) -> float:
        """For how long the thread will work, as far as is known."""
        return max(self._through_at - self._now(), 0.0)

    def _worked_s(self) -> float:
        """For how long it has worked."""
        return self.busy_s - self._ahead_s()

    def _take(self, seconds: float, since_s: float = 0.0) -> None:
        """Takes a piece of work on, which could have begun so long ago."""
        if seconds:
            seconds *= self._slowdown()
            self._through_at = max(self._through_at, self._now() - since_s) + seconds
            self.busy_s += seconds

    def _at(self, t: float, fn: Callable[[], None]) -> None:
        if t <= self._now():
            fn()
        else:
            self._running_at(t, fn)
