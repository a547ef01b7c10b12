"""Driver of :class:`Member` in a run that survives the loss of members, on the wall clock and in virtual time."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from farflung.comm import Started
from farflung.comm.failure_detector import BUSY
from farflung.errors import FarflungError, Left, RunLost, Suspended
from farflung.membership.connections import PROBE, TAG, Connections, text_of, text_payload
from farflung.membership.exchanges import ExchangeLog
from farflung.membership.giving import PLAN, WANT, StateGiver
from farflung.membership.joining import ADMIT, Joiner
from farflung.membership.member import Member
from farflung.membership.messages import Malformed, Message, MessageCodec, Report
from farflung.membership.roster import Roster
from farflung.membership.supervision import Page
from farflung.membership.suspicion import ANSWER, Suspicion
from farflung.membership.views import View
from farflung.tasks import Pending
from farflung.types import Runtime

__all__ = ["DONE", "Agreement"]

DONE = b"done"
"""Message of a sender that has every result of the run."""
_IDLE_S = 1.0
"""Seconds without a pending exchange after which a view admits others."""
_ENTERED = 3
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
      quorum: ``"majority"`` or ``"1"``, see :class:`Elastic`.
      patience_s: See :class:`Elastic`.
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
        least: int,
        quorum: str,
        patience_s: float,
        returns: bool,
        first_step: int,
        told: Callable[[Sequence[int]], None] | None,
    ) -> None:
        self.runtime, self.roster, self.patience_s = runtime, roster, patience_s
        self._comm, self._page, self._least, self._told = runtime.comm, page, least, told
        self._returns = returns and quorum != "1"
        self.met: Callable[[int], None] | None = None
        """Callback that receives the rank of each process that connects after the start."""
        self.codec = MessageCodec(key)
        name, names = str(runtime.comm.rank), roster.view.members
        is_joining = name not in names
        self.member = Member(
            name,
            self,
            self.codec.certify,
            None if is_joining else roster.view,
            quorum=1 if quorum == "1" else "majority",
        )
        self.member.connected.update(set(names) - {name})
        self.is_over = False
        """True if this member no longer takes part."""
        self.error: FarflungError | None = None
        """Reason why it no longer takes part, unless it has all results of the run."""
        self.last: Started[Any] | None = None
        """Last exchange of the run, which is whole once any member ends."""
        self.leaves: Pending[None] | None = None
        """Completes when this member has left; ``None`` if it was not asked to."""
        self.interrupted = Pending[None]()
        """Fails once this member no longer takes part, or is suspended; each membership has a new one."""
        self._settles = self._others_ended = False
        self._admits_s, self._entered = math.inf, 0
        """Latest time at which a view admits others, and number of steps started since a candidate appeared."""
        self.connections = Connections(
            runtime, self.member, lambda: roster.view, patience_s, self._returns, self.settle_soon
        )
        self.log = ExchangeLog(self, first_step)
        self.giver = StateGiver(self, self.log)
        self.joiner = Joiner(self, self.log, is_joining)
        self.suspicion = Suspicion(self, self.log)
        if runtime.comm.size > 1:
            self.launch(self._listen())
            self.launch(self._welcome())  # before departures: an earlier arrival may have left since
            self.launch(self._watch())
            self.launch(self.suspicion.attend())
            self.launch(self.giver.serve())
            self.joiner.listen()

    def launch(self, work: Coroutine[Pending[Any], None, None]) -> None:
        """Starts background work; an unexpected error in it stops the run."""

        def report_failure(task: Pending[None]) -> None:
            if isinstance(error := task.error, Exception) and not isinstance(error, FarflungError):
                logging.getLogger("farflung").error("the agreement on members failed", exc_info=error)
                self.stop(f"the agreement on members failed: {type(error).__name__}: {error}")

        self.runtime.launch(work).on_done(report_failure)

    @property
    def joins(self) -> bool:
        """Returns True if this member has not received the state of the run yet."""
        return self.joiner.follower is not None

    # --- effects ----------------------------------------------------------------------------------------------------

    def send(self, name: str, message: Message) -> None:
        self._comm.send(text_payload(self.codec.encode(message)), int(name), TAG, -1)

    def keep(self, report: Report) -> None:
        if self._page is not None:
            self._page.keep(self.codec.encode(report))

    def freeze(self) -> tuple[int, ...]:
        whole_exchanges, view = self.log.freeze(), self.roster.view
        if self._others_ended:
            self._end_with_others()
        if self.joins:
            return ()
        self.launch(self.suspicion.lose_patience(view))
        self.launch(self.suspicion.hear_all(view))
        return whole_exchanges

    def install(self, view: View) -> None:
        previous_members = self.roster.view.members
        self.roster.enter(view)
        self.log.is_frozen, self.log.error = False, self.error
        self._comm.advance(view.number)
        self.connections.await_back(set(previous_members).difference(view.members))
        if self.joiner.install(view):
            if self._told is not None:
                self._told(self.roster.members)
            return
        if len(view.members) < self._least:
            self.stop(f"view {view.number} has {len(view.members)} members, and the run needs {self._least}")
            return
        if view.number > self.roster.changes[-1].view:
            self.log.change(previous_members, view)
        self.giver.close(int(name) for name in previous_members if name not in view.members)
        self.giver.tell_view()
        self.giver.plan()
        if self._told is not None:
            self._told(self.roster.changes[-1].ranks)
        self.log.install(view)

    def hand(self, view: View) -> None:
        if self.roster.view.number < view.number:  # a member that leaves does not install the view
            self._comm.advance(view.number)
        for giver, receiver, number in view.transfers():
            # A member without the state asks for it.
            if giver == self.member.name and receiver in view.holders[0]:
                self.log.hand(receiver, number)

    def suspend(self, view: View) -> bool:
        error = Suspended(f"view {view.number} is without this replica, which the others did not hear")
        self.joiner.suspended = error
        if not self._returns or self.error is not None:
            return False
        logging.getLogger("farflung").warning("%s: it asks to be admitted again", error)
        self.roster.enter(view)
        self.giver.close(self.giver.ranks)
        self.joiner.suspend(error)
        self.log.fail(error)
        interrupted, self.interrupted, self.last = self.interrupted, Pending(), None
        interrupted.fail(error)
        self.log.clear()
        self.connections.await_back(view.members)
        return True

    def stop(self, reason: str, error: FarflungError | None = None) -> None:
        """Ends this member's part in the run with an error."""
        self.is_over = True
        self.error = error or (Left(reason) if self.member.left else RunLost(reason))
        if self.leaves is not None:
            self.leaves.set(None) if self.member.left else self.leaves.fail(self.error)
        self.interrupted.fail(self.error)
        self.joiner.end(self.error)
        self.log.fail(self.error)

    # --- events -----------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            source, payload = await self._comm.recv_any(TAG, deadline_s=math.inf)
            try:
                text = text_of(payload)
            except ValueError:
                self.lose(str(source), is_malformed=True)
            else:
                self._hear(str(source), text)

    def _hear(self, source: str, text: bytes) -> None:
        if source in self.connections.malformed:
            return
        if self.connections.hear(source):
            self.launch(self.joiner.ask(source))
        try:
            if text == PROBE:
                self.suspicion.answer(source)
            elif text == ADMIT:
                self.member.guest(source)
            elif text.startswith((WANT, PLAN)):
                self.giver.hear(source, text)
                return
            elif text.startswith(ANSWER):
                self.suspicion.hear(source, text)
            elif text == DONE:
                self._end_with_others()
                return
            else:
                message = self.codec.decode(text)
                if isinstance(message, Report):
                    self.joiner.hear_of(message.view)
                self.member.hear(source, message)
        except Malformed:
            self.lose(source, is_malformed=True)
        self.settle_soon()

    def certified(self, text: bytes) -> None:
        """Handles the supervisor's certificate of another process."""
        self.member.hear("", self.codec.decode(text))
        self.settle_soon()

    def lose(self, name: str, *, is_malformed: bool = False) -> None:
        """Marks a process as lost; later messages are ignored if it has sent a malformed one."""
        if is_malformed:
            self.connections.malformed.add(name)
        self.member.lost(name)
        self.settle_soon()

    def _end_with_others(self) -> None:
        """Ends because another member has every result of the run."""
        self._others_ended = True
        if self.last is not None:
            self.is_over = True
            self.last.result.set(())
        elif not self.joiner.has_begun:
            reason = "the run has ended before this replica could begin"
            self.stop(reason, Left(reason))
        elif self.joins or self.log.is_frozen:
            self.stop("the run has ended before this replica could return")

    async def _welcome(self) -> None:
        while True:
            name = str(await self._comm.arrival())
            if name not in self.connections.malformed:
                self.connections.come(name)
                if self.met is not None:
                    self.met(int(name))
                self.launch(self.joiner.ask(name))
                self.giver.greet(int(name))
                self.joiner.come(name)
                self.settle_soon()

    async def _watch(self) -> None:
        while True:
            name = str(await self._comm.departure())
            if not self.connections.go(name):
                continue
            self.joiner.go(name)
            if int(name) in self.giver.ranks:
                self.launch(self._keep_offer(name))
            if self.is_over:
                continue
            if self.joiner.suspended is not None or (
                name in self.roster.known and name not in self.roster.view.members
            ):
                self.connections.await_back([name])
            self.settle_soon()

    async def _keep_offer(self, name: str) -> None:
        """Reconnects to a replica that follows, and keeps its offer while it may return."""
        self.connections.await_back([name])
        await self.runtime.sleep_until(self.runtime.now() + BUSY * self.patience_s)
        if name not in self.member.connected:
            self.giver.close([int(name)])

    # --- when the member acts ---------------------------------------------------------------------------------------

    def settle_soon(self) -> None:
        """Schedules the processing of events after all arrived messages have been handled."""
        if not self._settles:
            self._settles = True
            self.launch(self._settle())

    async def before_exchange(self, ends_step: bool) -> None:
        """Lets a view admit others before an exchange, if no exchange is pending or some always is."""
        if self._admits_s < math.inf and not self.log.is_frozen:
            self._entered += ends_step
            if not self.log.under_way() or self._entered > _ENTERED:
                await self._settle(between=True)

    async def _settle(self, *, between: bool = False) -> None:
        """Processes events now.

        Args:
          is_between: True if no exchange is pending. A view delays admissions until then, for at most half of the
            patience, because pending exchanges must be repeated.
        """
        self._settles, time_s = False, self.runtime.now()
        if self.is_over:
            return
        if not self.member.has_candidates:
            self._admits_s = math.inf
        elif self._admits_s == math.inf:
            self._admits_s, self._entered = time_s + self.patience_s / 2, 0
            self.connections.settle_at(self._admits_s)
            self.launch(self._settle_idle(time_s + min(_IDLE_S, self.patience_s / 8)))
        self.member.settle(ready=not self.connections.repair(), admits=between or time_s >= self._admits_s)
        if self.connections.more_cuts():
            self.settle_soon()

    async def _settle_idle(self, seconds: float) -> None:
        """Processes events at a time, as between exchanges if none is pending."""
        await self.runtime.sleep_until(seconds)
        await self._settle(between=not self.log.under_way())
