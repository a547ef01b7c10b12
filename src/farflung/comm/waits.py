"""Wait monitor of one member of a view: fails waits on silent or idle ranks, and reports to other members."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from farflung.comm.mailbox import QUESTIONS
from farflung.comm.transport import Traffic
from farflung.comm.wire import Kind
from farflung.errors import DeadlinePassed
from farflung.tasks import Pending, done

if TYPE_CHECKING:
    from farflung.comm.failure_detector import FailureDetector
    from farflung.comm.view import View

__all__ = ["Waits"]


class Waits:
    """Monitor of one member's waits; see :class:`farflung.comm.failure_detector.FailureDetector`.

    Args:
      view: View of the member.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._failure_detector: FailureDetector | None = None
        """Failure detector, built for the first wait that lasts."""
        self._deadline_s = math.inf
        """Deadline of the run, as of the last check."""
        self.events: Callable[[], int] = lambda: 0
        """Returns the number of steps and computations of this rank so far."""
        self._has_data = True
        self._data: Pending[None] = done(None)

    def check(self, deadline_s: float) -> float | None:
        """Fails waits that have passed their deadline.

        A wait without its own deadline fails if the rank that it depends on is silent for ``deadline_s``, or
        idle for long. It then ends the view, or fails alone if the view does not need all members.

        Returns:
          Time of the next check; None if there is no wait.
        """
        time_s, mailbox = self._view.now(), self._view.mailbox
        self._deadline_s = deadline_s
        mailbox.fail_due(time_s)
        check_times = [mailbox.next_due(), self._check_oldest(time_s, deadline_s)]
        return min((check_s for check_s in check_times if check_s is not None), default=None)

    def _check_oldest(self, now: float, deadline_s: float) -> float | None:
        """Checks the oldest wait without its own deadline; probes the peers when that is due.

        Returns:
          Time of the next check; None if there is no such wait.
        """
        view = self._view
        waiting, probe_s = view.mailbox.oldest(), math.inf
        if waiting is not None:
            probe_s = waiting.since + deadline_s / QUESTIONS
        if self._failure_detector is None and now < probe_s:
            return None if waiting is None else probe_s
        detector = self._detector(probe_s)
        if waiting is None:
            detector.rest()
            return None
        check = detector.check(waiting, view.present(), now, deadline_s)
        if check.failure is not None:
            description = f"{waiting.what}{view.through(waiting.src)}"
            rank, reason = check.failure
            passed = DeadlinePassed(rank, description, now - waiting.since, why=reason)
            if not view.is_whole:
                view.mailbox.fail(waiting, passed)
                return self._check_oldest(now, deadline_s)
            view.end(passed)
            return None
        if check.asks:
            for rank in view.present():
                self._report_to(rank, asks=True)
        return check.due_s

    def _detector(self, due_s: float = math.inf) -> FailureDetector:
        """Returns the failure detector, which is built for the first wait that lasts."""
        if self._failure_detector is None:
            from farflung.comm.failure_detector import FailureDetector

            self._failure_detector = FailureDetector(self._view.rank, self._traffic, due_s)
        return self._failure_detector

    def hear(self, rank: int) -> None:
        """Records that a message of a member has arrived through a relay."""
        if self._failure_detector is not None:
            self._failure_detector.hear(rank, self._view.now())

    def hear_report(self, rank: int, body: Mapping[str, Any]) -> None:
        """Records a member's report of itself, and answers a probe."""
        self._detector().hear_report(rank, body, self._view.now(), self._deadline_s)
        if body.get("asks") is True:
            self._report_to(rank, asks=False)

    def forget(self, rank: int) -> None:
        """Discards the state of an earlier holder of a rank."""
        if self._failure_detector is not None:
            self._failure_detector.forget(rank)

    def _report_to(self, rank: int, *, asks: bool) -> None:
        """Reports progress and the source that blocks this rank to a peer; a probe asks for a report in return."""
        view, waiting = self._view, self._view.mailbox.any_wait()
        blocked_on = None if waiting is None else waiting.src
        body = {
            "for": blocked_on if self._has_data else "data",
            "count": self.events() + view.num_sent.total() + view.num_heard.total(),
            "nbytes": self.moved_nbytes(),
            "asks": asks,
        }
        view.say(Kind.WAITING, rank, body)

    def moved_nbytes(self, rank: int | None = None) -> int:
        """Returns the bytes of large tensors to and from a peer, or all peers, so far."""
        view = self._view
        ranks = view.present() if rank is None else [view.routes.next_hop(rank)]
        return sum(view.transport.traffic(peer).moved_nbytes for peer in ranks)

    def _traffic(self, rank: int) -> Traffic:
        """Returns the traffic of a peer or its relay; bytes from a relay are no signs of life of other ranks."""
        hop = self._view.routes.next_hop(rank)
        traffic = self._view.transport.traffic(hop)
        return traffic if hop == rank else traffic._replace(heard_nbytes=0)

    def wait_for_data(self, ready: Pending[None]) -> None:
        """Marks this rank as waiting for samples; ``ready`` fails when the view ends."""
        self._has_data, self._data = False, ready
        if self._view.lost is not None:
            ready.fail(self._view.lost)

    def end_wait_for_data(self) -> None:
        """Ends :meth:`wait_for_data`."""
        self._has_data = True

    def end(self, error: BaseException) -> None:
        """Fails the wait for samples, since the view has ended."""
        self._data.fail(error)
