"""Wait monitor of one member of a view: fails waits on silent or idle ranks, and reports to other members."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from farflung.comm.mailbox import PROBES_PER_DEADLINE
from farflung.comm.members import ViewMembers
from farflung.comm.transport import ConnectionTraffic
from farflung.comm.wire import MessageKind
from farflung.errors import DeadlinePassed
from farflung.tasks import Pending, create_completed

if TYPE_CHECKING:
    from farflung.comm.failure_detector import FailureDetector

__all__ = ["WaitMonitor"]


class WaitMonitor:
    """Monitor of one member's waits; see :class:`farflung.comm.failure_detector.FailureDetector`.

    Args:
      members: Members of the view.
      read_clock: Clock, in seconds.
    """

    def __init__(self, members: ViewMembers, read_clock: Callable[[], float]) -> None:
        self._members, self._mailbox, self._read_clock = members, members.mailbox, read_clock
        self._failure_detector: FailureDetector | None = None
        """Failure detector, built for the first wait that lasts."""
        self._deadline_s = math.inf
        """Deadline of the run, as of the last check."""
        self.count_events: Callable[[], int] = lambda: 0
        """Returns the number of steps and computations of this rank so far."""
        self._has_data = True
        self._data_wait: Pending[None] = create_completed(None)
        self._mailbox.ended.add_done_callback(self._fail_data_wait)

    def check(self, deadline_s: float) -> float | None:
        """Fails waits that have passed their deadline.

        A wait without its own deadline fails if the rank that it depends on is silent for ``deadline_s``, or
        idle for long. It then ends the view, or fails alone if the view does not need all members.

        Returns:
          Time of the next check; None if there is no wait.
        """
        time_s = self._read_clock()
        self._deadline_s = deadline_s
        check_times = [self._mailbox.waits.fail_due(time_s), self._check_oldest(time_s, deadline_s)]
        return min((check_s for check_s in check_times if check_s is not None), default=None)

    def _check_oldest(self, time_s: float, deadline_s: float) -> float | None:
        """Checks the oldest wait without its own deadline; probes the peers when that is due.

        Returns:
          Time of the next check; None if there is no such wait.
        """
        members, waits = self._members, self._mailbox.waits
        waiting, probe_s = waits.get_oldest(), math.inf
        if waiting is not None:
            probe_s = waiting.start_s + deadline_s / PROBES_PER_DEADLINE
        if self._failure_detector is None and time_s < probe_s:
            return None if waiting is None else probe_s
        detector = self._get_detector(probe_s)
        if waiting is None:
            detector.stop_probing()
            return None
        check = detector.check(waiting, members.present_ranks, time_s, deadline_s)
        if check.failure is not None:
            description = f"{waiting.description}{members.routes.describe_relay(waiting.src)}"
            rank, reason = check.failure
            passed = DeadlinePassed(rank, description, time_s - waiting.start_s, reason=reason)
            if not members.needs_all:
                waits.fail(waiting, passed)
                return self._check_oldest(time_s, deadline_s)
            self._mailbox.end(passed)
            return None
        if check.should_probe:
            for rank in members.present_ranks:
                self._report_to(rank, is_probe=True)
        return check.next_check_s

    def _get_detector(self, next_check_s: float = math.inf) -> FailureDetector:
        """Returns the failure detector, which is built for the first wait that lasts."""
        if self._failure_detector is None:
            from farflung.comm.failure_detector import FailureDetector

            self._failure_detector = FailureDetector(self._members.rank, self._get_traffic, next_check_s)
        return self._failure_detector

    def record_message(self, rank: int) -> None:
        """Records that a message of a member has arrived through a relay."""
        if self._failure_detector is not None:
            self._failure_detector.record_message(rank, self._read_clock())

    def handle_report(self, rank: int, body: Mapping[str, Any]) -> None:
        """Records a member's report of itself, and answers a probe."""
        self._get_detector().record_report(rank, body, self._read_clock(), self._deadline_s)
        if body.get("asks") is True:
            self._report_to(rank, is_probe=False)

    def _report_to(self, rank: int, *, is_probe: bool) -> None:
        """Reports progress and the source that blocks this rank to a peer; a probe asks for a report in return."""
        members, waiting = self._members, self._mailbox.waits.get_any()
        blocked_on = None if waiting is None else waiting.src
        num_messages = sum(peer.num_sent + peer.num_received for peer in members.by_rank.values())
        body = {
            "for": blocked_on if self._has_data else "data",
            "count": self.count_events() + num_messages,
            "nbytes": self.get_traffic_nbytes(),
            "asks": is_probe,
        }
        members.send_control(MessageKind.WAITING, rank, body)

    def get_traffic_nbytes(self, rank: int | None = None) -> int:
        """Returns the bytes of large tensors so far to and from a peer, or its relay if it has one, or all peers."""
        members = self._members
        ranks = members.present_ranks if rank is None else {members.routes.next_hops.get(rank, rank)}
        return sum(members.transport.get_traffic(peer).bulk_nbytes for peer in ranks)

    def _get_traffic(self, rank: int) -> ConnectionTraffic:
        """Returns the traffic of a peer or its relay; bytes from a relay are no signs of life of other ranks."""
        hop = self._members.routes.next_hops.get(rank, rank)
        traffic = self._members.transport.get_traffic(hop)
        return traffic if hop == rank else traffic._replace(received_nbytes=0)

    def wait_for_data(self, ready: Pending[None]) -> None:
        """Marks this rank as waiting for samples; ``ready`` fails when the view ends."""
        self._has_data, self._data_wait = False, ready
        if self._mailbox.ended.is_done:
            self._fail_data_wait(self._mailbox.ended)

    def end_wait_for_data(self) -> None:
        """Ends :meth:`wait_for_data`."""
        self._has_data = True

    def _fail_data_wait(self, ended: Pending[None]) -> None:
        assert ended.error is not None
        self._data_wait.set_exception(ended.error)
