"""Driver of :class:`Member` in a run that survives the loss of members, on the wall clock and in virtual time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from farflung.comm import ExchangeHandle
from farflung.comm.failure_detector import MAX_IDLE_DEADLINES
from farflung.errors import FarflungError, ReplicaLeft, ReplicaSuspended, RunLost
from farflung.membership.connections import PROBE, TAG, Connections, build_payload, read_payload
from farflung.membership.exchanges import ExchangeLog
from farflung.membership.giving import PLAN, WANT, StatePublisher
from farflung.membership.joining import ADMIT, Joiner
from farflung.membership.liveness import ANSWER, LivenessMonitor
from farflung.membership.member import Member
from farflung.membership.messages import MalformedMessage, MemberReport, Message, MessageCodec
from farflung.membership.roster import Roster
from farflung.membership.supervision import Page
from farflung.membership.views import View
from farflung.tasks import Pending
from farflung.types import Runtime

__all__ = ["RUN_COMPLETE", "Agreement"]

RUN_COMPLETE = b"done"
"""Message of a sender that has every result of the run."""
_ADMISSION_IDLE_S = 1.0
"""Seconds without a pending exchange after which a view admits others."""
_ADMISSION_STEPS = 3
"""Number of steps after which a view admits others although some exchange is always pending."""


class Agreement:
    """Driver that passes events to a :class:`Member` and carries out its effects.

    It belongs to the thread that carries exchanges, and so do its parts: ``log`` of exchanges, ``giver`` of the state
    to others, ``joiner`` for this member's own way into the run, and ``liveness`` of the others.

    Args:
      runtime: Runtime of this member, whose view may lose members.
      key: Secret of the run that signs certificates.
      roster: Members of the run.
      page: Memory for the reports that a supervisor reads after this process's end; ``None`` without a supervisor.
      min_members: Number of members below which the run ends.
      quorum: ``"majority"`` or ``"1"``, see :class:`farflung.membership.PaxosMembership`.
      patience_s: See :class:`farflung.membership.PaxosMembership`.
      can_return: True if this member asks to be admitted again after the others have continued without it.
      first_step: First step of the run.
      on_view: Callback that receives the members of each new view, by seniority.
    """

    def __init__(
        self,
        runtime: Runtime,
        key: bytes,
        roster: Roster,
        *,
        page: Page | None,
        min_members: int,
        quorum: str,
        patience_s: float,
        can_return: bool,
        first_step: int,
        on_view: Callable[[Sequence[int]], None] | None,
    ) -> None:
        self.runtime, self.roster, self.patience_s = runtime, roster, patience_s
        self._comm, self._page, self._min_members, self._on_view = runtime.comm, page, min_members, on_view
        self._can_return = can_return and quorum != "1"
        self.on_connect: Callable[[int], None] | None = None
        """Callback that receives the rank of each process that connects after the start."""
        self.codec = MessageCodec(key)
        name, names = str(runtime.comm.rank), roster.view.members
        is_joining = name not in names
        self.member = Member(
            name,
            self,
            self.codec.sign_certificate,
            None if is_joining else roster.view,
            quorum=1 if quorum == "1" else "majority",
        )
        self.member.connected_names.update(set(names) - {name})
        self.is_over = False
        """True if this member no longer takes part."""
        self.error: FarflungError | None = None
        """Reason why it no longer takes part, unless it has all results of the run."""
        self.last_exchange: ExchangeHandle[Any] | None = None
        """Last exchange of the run, which is complete once any member ends."""
        self.leave_result: Pending[None] | None = None
        """Completes when this member has left; ``None`` if it was not asked to."""
        self.interruption = Pending[None]()
        """Fails once this member no longer takes part, or is suspended; each membership has a new one."""
        self._is_scheduled = self._has_run_ended = False
        self._admission_s, self._num_steps = math.inf, 0
        """Latest time at which a view admits others, and number of steps started since a candidate appeared."""
        self.connections = Connections(
            runtime, self.member, lambda: roster.view, patience_s, self._can_return, self.schedule_processing
        )
        self.log = ExchangeLog(self, first_step)
        self.giver = StatePublisher(self, self.log)
        self.joiner = Joiner(self, self.log, is_joining)
        self.liveness = LivenessMonitor(self, self.log)
        if runtime.comm.size > 1:
            self.launch(self._receive_messages())
            # Before departures: an earlier arrival may have left since.
            self.launch(self._handle_new_connections())
            self.launch(self._handle_lost_connections())
            self.launch(self.liveness.watch_exchanges())
            self.launch(self.giver.serve_requests())
            self.joiner.listen()

    def launch(self, work: Coroutine[Pending[Any], None, None]) -> None:
        """Starts background work; an unexpected error in it stops the run."""

        def report_failure(task: Pending[None]) -> None:
            if isinstance(error := task.error, Exception) and not isinstance(error, FarflungError):
                logging.getLogger("farflung").error("the agreement on members failed", exc_info=error)
                self.stop(f"the agreement on members failed: {type(error).__name__}: {error}")

        self.runtime.launch(work).add_done_callback(report_failure)

    @property
    def is_joining(self) -> bool:
        """Returns True if this member has not received the state of the run yet."""
        return self.joiner.follower is not None

    # --- effects ----------------------------------------------------------------------------------------------------

    def send(self, name: str, message: Message) -> None:
        self._comm.send(build_payload(self.codec.encode(message)), int(name), TAG, -1)

    def store_report(self, report: MemberReport) -> None:
        if self._page is not None:
            self._page.write_report(self.codec.encode(report))

    def freeze(self) -> tuple[int, ...]:
        complete_exchanges, view = self.log.freeze(), self.roster.view
        if self._has_run_ended:
            self._end_with_others()
        if self.is_joining:
            return ()
        self.launch(self.liveness.await_agreement(view))
        self.launch(self.liveness.drop_silent(view))
        return complete_exchanges

    def install_view(self, view: View) -> None:
        previous_members = self.roster.view.members
        self.roster.enter_view(view)
        self.log.is_frozen, self.log.error = False, self.error
        self._comm.advance_view(view.number)
        self.connections.reconnect_lost(set(previous_members).difference(view.members))
        if self.joiner.did_defer_view(view):
            if self._on_view is not None:
                self._on_view(self.roster.members)
            return
        if len(view.members) < self._min_members:
            self.stop(
                f"view {view.number} has {len(view.members)} members, and the run needs {self._min_members}"
            )
            return
        if view.number > self.roster.changes[-1].view:
            self.log.record_change(previous_members, view)
        self.giver.close_offers(int(name) for name in previous_members if name not in view.members)
        self.giver.broadcast_view()
        self.giver.plan_snapshots()
        if self._on_view is not None:
            self._on_view(self.roster.changes[-1].ranks)
        self.log.install_view(view)

    def send_handovers(self, view: View) -> None:
        if self.roster.view.number < view.number:  # a member that leaves does not install the view
            self._comm.advance_view(view.number)
        for giver, receiver, number in view.list_handovers():
            # A member without the state asks for it.
            if giver == self.member.name and receiver in view.holders[0]:
                self.log.send_result(receiver, number)

    def did_suspend(self, view: View) -> bool:
        error = ReplicaSuspended(f"view {view.number} is without this replica, which the others did not hear")
        self.joiner.suspension = error
        if not self._can_return or self.error is not None:
            return False
        logging.getLogger("farflung").warning("%s: it asks to be admitted again", error)
        self.roster.enter_view(view)
        self.giver.close_offers(self.giver.ranks)
        self.joiner.suspend(error)
        self.log.fail(error)
        interrupted, self.interruption, self.last_exchange = self.interruption, Pending(), None
        interrupted.set_exception(error)
        self.log.clear()
        self.connections.reconnect_lost(view.members)
        return True

    def stop(self, reason: str, error: FarflungError | None = None) -> None:
        """Ends this member's part in the run with an error."""
        self.is_over = True
        self.error = error or (ReplicaLeft(reason) if self.member.has_left else RunLost(reason))
        if self.leave_result is not None:
            self.leave_result.set_result(None) if self.member.has_left else self.leave_result.set_exception(
                self.error
            )
        self.interruption.set_exception(self.error)
        self.joiner.end(self.error)
        self.log.fail(self.error)

    # --- events -----------------------------------------------------------------------------------------------------

    async def _receive_messages(self) -> None:
        while True:
            source, payload = await self._comm.recv_any(TAG, deadline_s=math.inf)
            try:
                text = read_payload(payload)
            except ValueError:
                self.mark_lost(str(source), is_malformed=True)
            else:
                self._handle_message(str(source), text)

    def _handle_message(self, source: str, text: bytes) -> None:
        if source in self.connections.malformed_names:
            return
        if self.connections.did_reappear(source):
            self.launch(self.joiner.send_requests(source))
        try:
            if text == PROBE:
                self.liveness.send_answer(source)
            elif text == ADMIT:
                self.member.handle_guest(source)
            elif text.startswith((WANT, PLAN)):
                self.giver.handle_request(source, text)
                return
            elif text.startswith(ANSWER):
                self.liveness.handle_answer(source, text)
            elif text == RUN_COMPLETE:
                self._end_with_others()
                return
            else:
                message = self.codec.decode(text)
                if isinstance(message, MemberReport):
                    self.joiner.handle_view(message.view)
                self.member.handle_message(source, message)
        except MalformedMessage:
            self.mark_lost(source, is_malformed=True)
        self.schedule_processing()

    def handle_certificate(self, text: bytes) -> None:
        """Handles the supervisor's certificate of another process."""
        self.member.handle_message("", self.codec.decode(text))
        self.schedule_processing()

    def mark_lost(self, name: str, *, is_malformed: bool = False) -> None:
        """Marks a process as lost; later messages are ignored if it has sent a malformed one."""
        if is_malformed:
            self.connections.malformed_names.add(name)
        self.member.handle_loss(name)
        self.schedule_processing()

    def _end_with_others(self) -> None:
        """Ends because another member has every result of the run."""
        self._has_run_ended = True
        if self.last_exchange is not None:
            self.is_over = True
            self.last_exchange.result.set_result(())
        elif not self.joiner.has_begun:
            reason = "the run has ended before this replica could begin"
            self.stop(reason, ReplicaLeft(reason))
        elif self.is_joining or self.log.is_frozen:
            self.stop("the run has ended before this replica could return")

    async def _handle_new_connections(self) -> None:
        while True:
            name = str(await self._comm.wait_for_join())
            if name not in self.connections.malformed_names:
                self.connections.handle_connection(name)
                if self.on_connect is not None:
                    self.on_connect(int(name))
                self.launch(self.joiner.send_requests(name))
                self.giver.send_offer(int(name))
                self.joiner.handle_connection(name)
                self.schedule_processing()

    async def _handle_lost_connections(self) -> None:
        while True:
            name = str(await self._comm.wait_for_leave())
            if not self.connections.record_disconnect(name):
                continue
            self.joiner.handle_disconnect(name)
            if int(name) in self.giver.ranks:
                self.launch(self._close_offer_unless_back(name))
            if self.is_over:
                continue
            if self.joiner.suspension is not None or (
                name in self.roster.known_names and name not in self.roster.view.members
            ):
                self.connections.reconnect_lost([name])
            self.schedule_processing()

    async def _close_offer_unless_back(self, name: str) -> None:
        """Reconnects to a replica that follows, and closes its offer unless it returns in time."""
        self.connections.reconnect_lost([name])
        await self.runtime.sleep_until(self.runtime.read_clock() + MAX_IDLE_DEADLINES * self.patience_s)
        if name not in self.member.connected_names:
            self.giver.close_offers([int(name)])

    # --- when the member acts ---------------------------------------------------------------------------------------

    def schedule_processing(self) -> None:
        """Schedules the processing of events after all arrived messages have been handled."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self.launch(self._process_events())

    async def prepare_exchange(self, is_last_of_step: bool) -> None:
        """Lets a view admit others before an exchange, if no exchange is pending or some always is."""
        if self._admission_s < math.inf and not self.log.is_frozen:
            self._num_steps += is_last_of_step
            if not self.log.list_pending() or self._num_steps > _ADMISSION_STEPS:
                await self._process_events(is_between=True)

    async def _process_events(self, *, is_between: bool = False) -> None:
        """Processes events now.

        Args:
          is_between: True if no exchange is pending. A view delays admissions until then, for at most half of the
            patience, because pending exchanges must be repeated.
        """
        self._is_scheduled, time_s = False, self.runtime.read_clock()
        if self.is_over:
            return
        if not self.member.has_candidates:
            self._admission_s = math.inf
        elif self._admission_s == math.inf:
            self._admission_s, self._num_steps = time_s + self.patience_s / 2, 0
            self.connections.process_at(self._admission_s)
            self.launch(self._process_when_idle(time_s + min(_ADMISSION_IDLE_S, self.patience_s / 8)))
        self.member.process_events(
            can_vote=not self.connections.start_repairs(),
            can_admit=is_between or time_s >= self._admission_s,
        )
        if self.connections.has_new_cuts():
            self.schedule_processing()

    async def _process_when_idle(self, seconds: float) -> None:
        """Processes events at a time, as between exchanges if none is pending."""
        await self.runtime.sleep_until(seconds)
        await self._process_events(is_between=not self.log.list_pending())
