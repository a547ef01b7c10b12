"""Admission of a member to a run: it receives the state, follows and is admitted; again after a suspension."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from farflung.comm import ExchangeChannel, ResultCodec
from farflung.comm.failure_detector import MAX_IDLE_DEADLINES
from farflung.errors import ReplicaSuspended, RunLost
from farflung.membership.connections import REPAIR_S, TAG, build_payload
from farflung.membership.exchanges import ExchangeLog, LoggedExchange
from farflung.membership.following import Follower
from farflung.membership.giving import NEWS, PIECES, WANT
from farflung.membership.views import View
from farflung.tasks import Pending
from farflung.types import Tag

if TYPE_CHECKING:
    from farflung.membership.agreement import Agreement

__all__ = ["ADMIT", "Joiner"]

T = TypeVar("T")

ADMIT = b"again"
"""Request for admission, also after a suspension."""
_BACK_OFF_S = 60.0
"""Maximum seconds that a repeatedly suspended member waits before it asks for admission."""


class Joiner:
    """Part of a joining or suspended member, until it takes part with the state of the run.

    Args:
      agreement: Agreement of this member.
      log: Exchanges of this member.
      is_joining: True if it joins the run later, False if it is a member from the start.
    """

    def __init__(self, agreement: Agreement, log: ExchangeLog, is_joining: bool) -> None:
        self._agreement, self._log, self._roster = agreement, log, agreement.roster
        self._runtime, self._comm = agreement.runtime, agreement.runtime.comm
        self._member, self._connections = agreement.member, agreement.connections
        self.follower = self._create_follower() if is_joining else None
        """Client that fetches the state of the run; ``None`` once this member takes part."""
        self.join_nbytes = 0
        """Bytes of the state and of results that this member received before it began."""
        self.suspension: ReplicaSuspended | None = None
        """Error that exchanges fail with until this member is admitted again."""
        self._deferred_views: list[View] = []
        """Views that were installed before the state had arrived."""
        self._suspension_times: list[float] = []
        """Times of suspensions."""
        self._needs_admission = self._is_seeking = False
        """Flags: it asks for admission, and it looks for members that have the state."""

    @property
    def has_begun(self) -> bool:
        """Returns True if this member has, or had, the state of the run."""
        return self.follower is None or bool(self._suspension_times)

    def _create_follower(self) -> Follower:
        def request() -> None:
            self._agreement.launch(self.send_requests())

        return Follower(
            self._runtime, request, self._request_admission, self._fail_start, self._roster.replace_changes
        )

    # --- for the replica --------------------------------------------------------------------------------------------

    async def receive_state(self) -> list[Tensor]:
        """Waits for a snapshot of the state of the run, and returns its parts."""
        if (error := self._agreement.error) is not None:
            raise error
        assert self.follower is not None
        if not self._is_seeking:
            self._is_seeking = True
            self._agreement.launch(self._watch_holders())
        self._agreement.launch(self.send_requests())
        return await self.follower.receive_snapshot()

    async def should_follow(self, step: int) -> bool:
        """Waits until a step can be followed; returns False if this member begins at it."""
        assert self.follower is not None
        self._log.step = step
        start_state = await self.follower.wait_for_step(step)
        if start_state is not None:
            self._begin(start_state)
        return start_state is None

    def _begin(self, start_state: Mapping[str, Any]) -> None:
        """Begins to take part, with all complete exchanges."""
        follower, self.follower, self._is_seeking = self.follower, None, False
        assert follower is not None
        self.join_nbytes = follower.received_nbytes
        self._comm.auto_collectives = dict(start_state["auto"])
        followed = []
        for number in start_state["log"]:
            if number not in follower.results:
                continue  # all members have the result
            logged = follower.followed_exchanges.get(number)
            if logged is None:  # this replica did not need it
                logged = self._build_exchange(*follower.get_exchange(number), number=number)
                self._log.taken_exchanges.append(logged)
            followed.append(logged)
        self._log.begin(start_state, follower.results, followed)
        known_view = self._roster.changes[-1].view
        for before, view in pairwise(self._deferred_views):
            if view.number > known_view:
                self._log.record_change(before.members, view)

    def _build_exchange(self, exchange: int, part: int, *more: Any, number: int = 0) -> LoggedExchange[Any]:
        channel = ExchangeChannel(self._comm, exchange, part)
        return LoggedExchange(channel, Pending(), self._log, number, exchange, part, *more)

    def follow_exchange(
        self, number: int, part: int, make: Callable[..., Any], result_codec: ResultCodec[T]
    ) -> LoggedExchange[T]:
        """Starts an exchange that takes its result from the members."""
        logged = self._build_exchange(number, part, make, result_codec)
        self._agreement.launch(self._follow(logged))
        return logged

    async def _follow(self, logged: LoggedExchange[Any]) -> None:
        if self.follower is None:
            error = self._agreement.error or ReplicaSuspended("it was started before this replica began")
            logged.result.set_exception(error)
            return
        followed = self.follower.followed_exchanges
        self._log.taken_exchanges = [x for x in self._log.taken_exchanges if x.number in followed]
        self.follower.follow_exchange(logged)

    # --- events -----------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Starts to handle news and pieces from members."""
        self._agreement.launch(self._receive_all(NEWS, Follower.handle_news))
        self._agreement.launch(self._receive_all(PIECES, Follower.receive_piece))

    async def _receive_all(self, tag: Tag, handle: Callable[..., None]) -> None:
        while True:
            source, payload = await self._comm.recv_any(tag, deadline_s=math.inf)
            if self.follower is not None:
                try:
                    text, *piece = payload.iter_tensors()
                    handle(self.follower, source, bytes(text.numpy()), *piece)
                except (ValueError, KeyError, TypeError, RecursionError):
                    self._agreement.mark_lost(str(source), is_malformed=True)

    def handle_view(self, view: View) -> None:
        """Records a view that has not admitted this member, so that it contacts the members of that view."""
        is_news = view.number > self._roster.view.number and view.holders
        if self.follower is not None and is_news and self._member.name not in view.members:
            self._roster.enter_view(view)

    def handle_connection(self, name: str) -> None:
        """Records that a process is connected again."""
        if self.follower is not None:
            self.follower.retry_requests(int(name))

    def handle_disconnect(self, name: str) -> None:
        """Records that a process is no longer connected."""
        if self.follower is not None:
            self.follower.drop_member(int(name))
            self._connections.reconnect_lost([name])
            self._agreement.launch(self._await_members())

    def did_defer_view(self, view: View) -> bool:
        """Records a view that contains this member; returns True if it is deferred because the state is missing."""
        self.suspension, self._needs_admission = None, False
        if self.follower is None:
            return False
        self._deferred_views.append(view)
        self.follower.is_waited_for = True
        return True

    def suspend(self, error: ReplicaSuspended) -> None:
        """Restarts with another snapshot."""
        self._deferred_views = []
        self.end(error)
        self.follower, self._needs_admission = self._create_follower(), False
        self._suspension_times.append(self._runtime.read_clock())

    def end(self, error: BaseException) -> None:
        """Ends all waits with an error."""
        if self.follower is not None:
            self.follower.fail_waits(error)

    # --- asking -----------------------------------------------------------------------------------------------------

    def _request_admission(self) -> None:
        """Starts to ask all members for admission."""
        if self._member.name not in self._roster.view.members:
            self._needs_admission = True
            self._agreement.launch(self.send_requests())

    async def send_requests(self, *names: str) -> None:
        """Asks others for the state, and for admission if this member has caught up or cannot.

        A member that was suspended before waits first.
        """
        if (count := len(self._suspension_times)) > 1:
            wait_s = min(2.0 ** (count - 2), _BACK_OFF_S)
            await self._runtime.sleep_until(self._suspension_times[-1] + wait_s)
        if self.follower is None or self._agreement.error is not None:
            return
        wants = [] if self.follower.is_too_far_behind else [WANT + b"%d" % self.follower.request_number]
        for name in sorted(self._member.connected_names.intersection(names or self._member.connected_names)):
            for text in [*wants, *([ADMIT] if self._needs_admission else [])]:
                self._comm.send(build_payload(text), int(name), TAG, -1)

    async def _watch_holders(self) -> None:
        """Ends a joining member if no member that has the state answers, or all had ended before it came.

        A suspended member waits for their return.
        """
        rounds = 0
        while self.follower is not None and self._agreement.error is None:
            view, began_s = self._roster.view, self._runtime.read_clock()
            self._connections.send_probes(view.holders[0])
            await self._runtime.sleep_until(began_s + self._agreement.patience_s)
            heard_s = [self._connections.last_received_s.get(x, -math.inf) for x in view.holders[0]]
            if view is not self._roster.view or any(t >= began_s for t in heard_s):
                rounds = 0
                continue
            rounds += 1
            if (
                self.suspension is None
                or rounds >= MAX_IDLE_DEADLINES
                or not self._connections.can_peers_return()
            ):
                self._fail_start()
                return
            self._connections.mark_silent(view.holders[0])
            self._connections.reconnect_lost(view.holders[0])

    def _is_alone(self) -> bool:
        """Returns True if no member that has the state is connected."""
        return not self._member.connected_names.intersection(self._roster.view.holders[0])

    async def _await_members(self) -> None:
        """Ends a joining member if no member that has the state is connected or reconnects in time."""
        if self._is_alone():
            await self._runtime.sleep_until(
                self._runtime.read_clock() + min(REPAIR_S, self._agreement.patience_s / 2)
            )
        if self.suspension is None and self._is_alone():
            self._fail_start()

    def _fail_start(self) -> None:
        names = ", ".join(self._roster.view.holders[0])
        self._stop(RunLost(f"rank {self._member.name} cannot begin: members {names} are lost or silent"))

    def fail_admission(self, rank: int, error: RunLost) -> None:
        """Ends this member because it cannot reach one that has to admit it."""
        members = self._roster.view.members
        if str(rank) in members and self._member.name not in members:
            self._stop(error)

    def _stop(self, error: RunLost) -> None:
        if self.follower is not None and self._agreement.error is None:
            self._agreement.stop(str(error), error)
