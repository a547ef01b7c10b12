"""Virtual coding processor: work of a modelled device for exchanges."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from farflung.comm.framing import MOST_PIECE_NBYTES
from farflung.devices import CodingRates
from farflung.tasks import Pending, done
from farflung.types import CodingCost

__all__ = ["Lane"]

ROUNDING_S = 1e-9
"""Tolerance of sums of seconds; work that is closer to its end is done."""


class Lane:
    """Communication thread of a modelled device; see :class:`farflung.types.CodingProcessor`.

    The thread codes, adds, takes a fixed time for each message that it sends or receives, and copies and encrypts
    their bytes. It does one piece of work after the other, in the order of requests. A message starts once its first
    256 KiB are ready, while the others follow. The receiver processes all but the last 256 KiB while the last ones
    arrive.

    The model omits shared memory bandwidth, the wait of a thread for a processor, and coding between two pieces of a
    message.

    Args:
      rates: Coding rates of the device.
      is_encrypted: Messages are encrypted.
      slowdown: Returns the factor by which everything is slower now.
      read_running_s: Returns the seconds for which the device has been running.
      call_when_running: Calls a function at a running time; never if the device crashes before.
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
        """Running time at which all requested work is done."""
        self.busy_s = 0.0
        """Total seconds of all requested work."""
        self.not_charged: dict[str, None] = {}
        """Methods without a rate for some of their work, in the order of requests."""

    def charge(self, cost: CodingCost) -> None:
        """Enqueues a piece of coding after all earlier work."""
        if (cost.operation, cost.method) not in self._rates.operations:
            self.not_charged[cost.method] = None
        self._take(self._rates.seconds(cost))

    def through(self) -> Pending[None]:
        """Waits until all work requested so far is done."""
        if self._through_at <= self._now():
            return done(None)
        pending: Pending[None] = Pending()
        self._at(self._through_at, partial(pending.set, None))
        return pending

    def send(self, nbytes: int, leave: Callable[[float], None]) -> None:
        """Sends a message of ``nbytes`` bytes.

        ``on_first_piece`` is called when its first piece is ready, with the seconds until the last piece is.
        """
        piece_s, all_s = self._seconds(nbytes)
        self._take(piece_s)
        first_ready_s = self._through_at
        self._take(all_s - piece_s)
        self._at(first_ready_s, partial(leave, self._through_at - first_ready_s))

    def receive(self, nbytes: int, since_s: float, deliver: Callable[[], None]) -> None:
        """Receives a message whose last byte has arrived.

        Args:
          nbytes: Bytes of the message.
          elapsed_s: Seconds since the first byte could have arrived.
          deliver: Called when the message can be used.
        """
        piece_s, all_s = self._seconds(nbytes)
        self._take(all_s - piece_s, since_s)
        self._take(piece_s)
        self._at(self._through_at, deliver)

    def _seconds(self, nbytes: int) -> tuple[float, float]:
        """Computes the seconds of the first or last piece of a message, and of the whole message."""
        message_s, byte_s = self._rates.message_s, self._byte_s
        piece_s = message_s + byte_s * min(nbytes, MOST_PIECE_NBYTES)
        return piece_s, message_s + byte_s * nbytes

    def beside(self, seconds: float, fn: Callable[[], None]) -> None:
        """Calls ``fn`` after ``seconds`` of work on a processor that stands still while the thread works."""
        end_s, worked_s = self._now() + seconds, self._worked_s()

        def check() -> None:
            due_s = end_s + (self._worked_s() - worked_s)
            if due_s <= self._now() + ROUNDING_S:
                fn()
            else:
                self._running_at(due_s + self._ahead_s(), check)

        self._running_at(end_s + self._ahead_s(), check)

    def _ahead_s(self) -> float:
        """Returns the seconds of work that remain, as far as is known."""
        return max(self._through_at - self._now(), 0.0)

    def _worked_s(self) -> float:
        return self.busy_s - self._ahead_s()

    def _take(self, seconds: float, since_s: float = 0.0) -> None:
        """Enqueues a piece of work, which could have begun ``elapsed_s`` ago."""
        if seconds:
            seconds *= self._slowdown()
            self._through_at = max(self._through_at, self._now() - since_s) + seconds
            self.busy_s += seconds

    def _at(self, t: float, fn: Callable[[], None]) -> None:
        if t <= self._now():
            fn()
        else:
            self._running_at(t, fn)
