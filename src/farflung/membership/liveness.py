"""Detection of members that are silent or busy for too long while others wait for them."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from farflung.comm.failure_detector import MAX_IDLE_DEADLINES, ProgressTracker
from farflung.membership.connections import TAG, build_payload
from farflung.membership.exchanges import ExchangeLog, LoggedExchange
from farflung.membership.views import View
from farflung.tasks import Pending

if TYPE_CHECKING:
    from farflung.membership.agreement import Agreement

__all__ = ["ANSWER", "LivenessMonitor"]

ANSWER = b"!"
"""Sign of life of its sender; its :class:`Counters` follow."""
_STUCK_FACTOR = 100
"""Multiple of the patience after which the run stops if all members answer and none makes progress."""


class Counters(NamedTuple):
    """Progress of a member.

    Args:
      num_started: Number of exchanges that it has started.
      num_events: Number of its steps and computations.
      nbytes: Bytes of messages to and from it.
    """

    num_started: int
    num_events: int
    nbytes: int

    def encode(self) -> bytes:
        return b"%d %d %d" % self

    @staticmethod
    def decode(text: bytes) -> Counters | None:
        """Returns the decoded counters of a member, or ``None`` if they are malformed."""
        counts = text.split(b" ") if len(text) < 64 else []
        return Counters(*map(int, counts)) if len(counts) == 3 and all(map(bytes.isdigit, counts)) else None


class LivenessMonitor:
    """Monitor that marks members as lost if they are silent or make no progress during a long exchange.

    Args:
      agreement: Agreement of this member.
      log: Exchanges that are waited for.
    """

    def __init__(self, agreement: Agreement, log: ExchangeLog) -> None:
        self._agreement, self._log = agreement, log
        self._runtime, self._roster, self._member = agreement.runtime, agreement.roster, agreement.member
        self._connections, self._patience_s = agreement.connections, agreement.patience_s
        self._started_counts: dict[str, int] = {}
        """Number of exchanges that each member had started at its last answer."""
        self._progress: dict[str, ProgressTracker] = {}
        """Progress of each member, including this one."""

    def send_answer(self, name: str) -> None:
        """Sends a process a sign of life, with this member's progress."""
        text = ANSWER + self._read_counters().encode()
        self._runtime.comm.send(build_payload(text), int(name), TAG, -1)

    def handle_answer(self, name: str, text: bytes) -> None:
        """Handles the answer of a process."""
        if (counters := Counters.decode(text[len(ANSWER) :])) is not None:
            self._started_counts[name] = counters.num_started
            self._record_progress(name, counters)

    def _read_counters(self) -> Counters:
        return Counters(self._log.num_started, self._runtime.events, self._runtime.comm.get_traffic_nbytes())

    def _record_progress(self, name: str, counters: Counters) -> None:
        time_s = self._runtime.read_clock()
        progress = self._progress.setdefault(name, ProgressTracker(time_s))
        progress.update(counters.num_started + counters.num_events, counters.nbytes, time_s, self._patience_s)

    def _compute_idle_s(self, names: Collection[str]) -> float:
        """Returns the seconds since the last known progress of any of some members."""
        moved_s = (self._progress[name].last_s for name in names if name in self._progress)
        return self._runtime.read_clock() - max(moved_s, default=-math.inf)

    async def watch_exchanges(self) -> None:
        """Requests signs of life from members during long exchanges, and drops silent members.

        Requests begin at half of the patience, one in each quarter. A member is silent if nothing has arrived from it
        for all of the patience, not even a part of a message. A busy member answers, since its communication thread
        does.
        """
        while not self._agreement.is_over:
            pending = self._log.list_pending()
            if self._log.is_frozen or not pending:
                self._log.wait_started = Pending()
                await self._log.wait_started
                continue
            oldest = min(pending, key=lambda x: x.number)
            begins_s = oldest.started_s + self._patience_s / 2
            if self._runtime.read_clock() < begins_s:
                await self._runtime.sleep_until(begins_s)
                continue
            await self._judge_members(self._roster.view, oldest)

    async def _judge_members(self, view: View, oldest: LoggedExchange[object]) -> None:
        """Requests signs of life from members, and drops those that are silent or busy for too long."""
        names = await self._connections.probe_members(self._patience_s / 4)
        if view is not self._roster.view or self._log.is_frozen or oldest.stored_result is not None:
            return
        waits_s = self._runtime.read_clock() - max(oldest.started_s, self._connections.resumed_s)
        reasons = {
            name: f"nothing has arrived from it for {silent_s:.2f} s"
            for name in names
            if (silent_s := min(self._connections.compute_silence_s(name), waits_s)) >= self._patience_s
        }
        self._record_progress(self._member.name, self._read_counters())
        min_started = min((self._started_counts.get(name, 0) for name in names), default=oldest.number)
        late_names = {
            name for name in names if self._started_counts.get(name, 0) == min_started < oldest.number
        }
        idle_s = min(waits_s, self._compute_idle_s(late_names or {*names, self._member.name}))
        if not reasons and late_names and idle_s >= MAX_IDLE_DEADLINES * self._patience_s:
            reason = f"it answers, but has neither reached that exchange nor made progress for {idle_s:.2f} s"
            reasons = dict.fromkeys(late_names, reason)
        elif not late_names and idle_s >= _STUCK_FACTOR * self._patience_s:
            self._agreement.stop(
                f"exchange {oldest.number} is not complete after {waits_s:.0f} s, and nothing has moved for "
                f"{idle_s:.0f} s, but all members answer"
            )
        for name in sorted(reasons):
            logging.getLogger("farflung").warning(
                "rank %s counts as lost: %s (exchange %d, step %d, is %.2f s old)",
                name,
                reasons[name],
                oldest.number,
                oldest.step,
                waits_s,
            )
        self._connections.mark_silent(reasons)

    async def probe(self) -> None:
        """Probes the members of the newest view once, and drops those that are silent for all of the patience."""
        view = self._roster.view
        names = await self._connections.probe_members(self._patience_s)
        if view is self._roster.view and not self._log.is_frozen and not self._agreement.is_over:
            self._mark_silent(names, self._patience_s)

    def _mark_silent(self, names: Collection[str], seconds: float) -> None:
        silent_s = self._connections.compute_silence_s
        self._connections.mark_silent(name for name in names if silent_s(name) >= seconds)

    async def drop_silent(self, view: View) -> None:
        """Drops members that do not answer while a view is ending.

        A member without a sign of life for three quarters of the patience is dropped at once, because it was asked
        already.
        """
        waits_s = self._runtime.read_clock() - min(
            (x.started_s for x in self._log.list_pending()), default=math.inf
        )
        if waits_s >= 0.75 * self._patience_s:
            self._mark_silent(
                self._member.connected_names.intersection(view.members), 0.75 * self._patience_s
            )
        names = await self._connections.probe_members(self._patience_s / 2)
        if view is self._roster.view and not self._agreement.is_over:
            self._mark_silent(names, self._patience_s / 2)

    async def await_agreement(self, view: View) -> None:
        """Gives up an agreement if no news of the view arrives within the patience.

        A member that may return waits as long for the others as for a busy member, unless all of their processes have
        ended.
        """
        ballot, since_s = -1, self._runtime.read_clock()
        while self._log.is_frozen and self._roster.view is view and not self._agreement.is_over:
            time_s = self._runtime.read_clock()
            if ballot != self._member.ballot:
                ballot, since_s = self._member.ballot, time_s
            elif (
                not self._connections.can_peers_return()
                or time_s >= since_s + MAX_IDLE_DEADLINES * self._patience_s
            ):
                self._member.give_up()
                return
            await self._runtime.sleep_until(time_s + self._patience_s)
