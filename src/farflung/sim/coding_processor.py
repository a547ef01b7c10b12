"""Virtual coding processor: work of a modelled device for exchanges."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from farflung.comm.framing import MAX_PIECE_NBYTES
from farflung.devices import CodingRates
from farflung.tasks import Pending, create_completed

__all__ = ["VirtualCodingProcessor"]

ROUNDING_S = 1e-9
"""Tolerance of sums of seconds; work that is closer to its end is done."""


class VirtualCodingProcessor:
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
        is_encrypted: bool,
        slowdown: Callable[[], float],
        read_running_s: Callable[[], float],
        call_when_running: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self._rates = rates
        self._slowdown = slowdown
        self._read_running_s = read_running_s
        self._call_when_running = call_when_running
        self._byte_s = rates.copy_s_per_byte + (rates.encrypt_s_per_byte if is_encrypted else 0.0)
        self._idle_from_s = 0.0
        """Running time at which all requested work is done."""
        self.busy_s = 0.0
        """Total seconds of all requested work."""
        self.uncharged_methods: dict[str, None] = {}
        """Methods without a rate for some of their work, in the order of requests."""

    def charge(self, operation: str, numel: int, method: str) -> None:
        """Enqueues a piece of coding after all earlier work."""
        if (operation, method) not in self._rates.operations:
            self.uncharged_methods[method] = None
        self._enqueue_work(self._rates.compute_seconds(operation, numel, method))

    def wait_idle(self) -> Pending[None]:
        """Waits until all work requested so far is done."""
        if self._idle_from_s <= self._read_running_s():
            return create_completed(None)
        pending: Pending[None] = Pending()
        self._call_at(self._idle_from_s, partial(pending.set_result, None))
        return pending

    def send(self, nbytes: int, on_first_piece: Callable[[float], None]) -> None:
        """Sends a message of ``nbytes`` bytes.

        ``on_first_piece`` is called when its first piece is ready, with the seconds until the last piece is.
        """
        piece_s, all_s = self._compute_seconds(nbytes)
        self._enqueue_work(piece_s)
        first_ready_s = self._idle_from_s
        self._enqueue_work(all_s - piece_s)
        self._call_at(first_ready_s, partial(on_first_piece, self._idle_from_s - first_ready_s))

    def receive(self, nbytes: int, elapsed_s: float, deliver: Callable[[], None]) -> None:
        """Receives a message whose last byte has arrived.

        Args:
          nbytes: Bytes of the message.
          elapsed_s: Seconds since the first byte could have arrived.
          deliver: Called when the message can be used.
        """
        piece_s, all_s = self._compute_seconds(nbytes)
        self._enqueue_work(all_s - piece_s, elapsed_s)
        self._enqueue_work(piece_s)
        self._call_at(self._idle_from_s, deliver)

    def _compute_seconds(self, nbytes: int) -> tuple[float, float]:
        """Computes the seconds of the first or last piece of a message, and of the whole message."""
        message_s, byte_s = self._rates.message_s, self._byte_s
        piece_s = message_s + byte_s * min(nbytes, MAX_PIECE_NBYTES)
        return piece_s, message_s + byte_s * nbytes

    def call_after_compute(self, seconds: float, fn: Callable[[], None]) -> None:
        """Calls ``fn`` after ``seconds`` of work on a processor that stands still while the thread works."""
        end_s, worked_s = self._read_running_s() + seconds, self._get_worked_s()

        def check() -> None:
            due_s = end_s + (self._get_worked_s() - worked_s)
            if due_s <= self._read_running_s() + ROUNDING_S:
                fn()
            else:
                self._call_when_running(due_s + self._get_remaining_s(), check)

        self._call_when_running(end_s + self._get_remaining_s(), check)

    def _get_remaining_s(self) -> float:
        """Returns the seconds of work that remain, as far as is known."""
        return max(self._idle_from_s - self._read_running_s(), 0.0)

    def _get_worked_s(self) -> float:
        return self.busy_s - self._get_remaining_s()

    def _enqueue_work(self, seconds: float, elapsed_s: float = 0.0) -> None:
        """Enqueues a piece of work, which could have begun ``elapsed_s`` ago."""
        if seconds:
            seconds *= self._slowdown()
            self._idle_from_s = max(self._idle_from_s, self._read_running_s() - elapsed_s) + seconds
            self.busy_s += seconds

    def _call_at(self, t: float, fn: Callable[[], None]) -> None:
        if t <= self._read_running_s():
            fn()
        else:
            self._call_when_running(t, fn)
