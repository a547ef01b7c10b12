"""Admission of a member to a run: it receives the state, follows and is admitted; again after a suspension."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeVar

from torch import Tensor

from farflung.comm import ExchangeChannel, Values
from farflung.comm.failure_detector import BUSY
from farflung.errors import RunLost, Suspended
from farflung.membership.connections import REPAIR_S, TAG, text_payload
from farflung.membership.exchanges import ExchangeLog, Logged
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

    def __init__(self, agreement: Agreement, log: ExchangeLog, joins: bool) -> None:
        self._agreement, self._log, self._roster = agreement, log, agreement.roster
        self._runtime, self._comm = agreement.runtime, agreement.runtime.comm
        self._member, self._connections = agreement.member, agreement.connections
        self.follower = self._new_follower() if joins else None
        """Client that fetches the state of the run; ``None`` once this member takes part."""
        self.given_nbytes = 0
        """Bytes of the state and of results that this member received before it began."""
        self.suspended: Suspended | None = None
        """Error that exchanges fail with until this member is admitted again."""
        self._unseen: list[View] = []
        """Views that were installed before the state had arrived."""
        self._suspensions: list[float] = []
        """Times of suspensions."""
        self._asks = self._seeks = False
        """Flags: it asks for admission, and it looks for members that have the state."""

    @property
    def has_begun(self) -> bool:
        """Returns True if this member has, or had, the state of the run."""
        return self.follower is None or bool(self._suspensions)

    def _new_follower(self) -> Follower:
        def request() -> None:
            self._agreement.launch(self.ask())

        return Follower(
            self._runtime, request, self._ask_to_be_admitted, self._cannot_begin, self._roster.take_changes
        )

    # --- for the replica --------------------------------------------------------------------------------------------

    async def receive_state(self) -> list[Tensor]:
        """Waits for a snapshot of the state of the run, and returns its parts."""
        if (error := self._agreement.error) is not None:
            raise error
        assert self.follower is not None
        if not self._seeks:
            self._seeks = True
            self._agreement.launch(self._seek())
        self._agreement.launch(self.ask())
        return await self.follower.snapshot()

    async def follows(self, step: int) -> bool:
        """Waits until a step can be followed; returns False if this member begins at it."""
        assert self.follower is not None
        self._log.step = step
        start_state = await self.follower.follows(step)
        if start_state is not None:
            self._begin(start_state)
        return start_state is None

    def _begin(self, begins: Mapping[str, Any]) -> None:
        """Begins to take part, with all whole exchanges."""
        follower, self.follower, self._seeks = self.follower, None, False
        assert follower is not None
        self.given_nbytes = follower.nbytes
        self._comm.auto = dict(begins["auto"])
        followed = []
        for number in begins["log"]:
            if number not in follower.results:
                continue  # all members have the result
            logged = follower.followed.get(number)
            if logged is None:  # this replica did not need it
                logged = self._logged(*follower.exchange_of(number), number=number)
                self._log.taken.append(logged)
            followed.append(logged)
        self._log.begin(begins, follower.results, followed)
        known_view = self._roster.changes[-1].view
        for before, view in pairwise(self._unseen):
            if view.number > known_view:
                self._log.change(before.members, view)

    def _logged(self, exchange: int, part: int, *more: Any, number: int = 0) -> Logged[Any]:
        channel = ExchangeChannel(self._comm, exchange, part)
        return Logged(channel, Pending(), self._log, number, exchange, part, *more)

    def follow(self, number: int, part: int, make: Callable[..., Any], values: Values[T]) -> Logged[T]:
        """Starts an exchange that takes its result from the members."""
        logged = self._logged(number, part, make, values)
        self._agreement.launch(self._follow(logged))
        return logged

    async def _follow(self, logged: Logged[Any]) -> None:
        if self.follower is None:
            error = self._agreement.error or Suspended("it was started before this replica began")
            logged.result.fail(error)
            return
        followed = self.follower.followed
        self._log.taken = [x for x in self._log.taken if x.number in followed]
        self.follower.follow(logged)

    # --- events -----------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Starts to handle news and pieces from members."""
        self._agreement.launch(self._take(NEWS, Follower.hear))
        self._agreement.launch(self._take(PIECES, Follower.take))

    async def _take(self, tag: Tag, take: Callable[..., None]) -> None:
        while True:
            source, payload = await self._comm.recv_any(tag, deadline_s=math.inf)
            if self.follower is not None:
                try:
                    text, *piece = payload.tensors()
                    take(self.follower, source, bytes(text.numpy()), *piece)
                except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                    self._agreement.lose(str(source), is_malformed=True)

    def hear_of(self, view: View) -> None:
        """Records a view that has not admitted this member, so that it contacts the members of that view."""
        is_news = view.number > self._roster.view.number and view.holders
        if self.follower is not None and is_news and self._member.name not in view.members:
            self._roster.enter(view)

    def come(self, name: str) -> None:
        """Records that a process is connected again."""
        if self.follower is not None:
            self.follower.ask_again(int(name))

    def go(self, name: str) -> None:
        """Records that a process is no longer connected."""
        if self.follower is not None:
            self.follower.drop(int(name))
            self._connections.await_back([name])
            self._agreement.launch(self._miss())

    def install(self, view: View) -> bool:
        """Records a view that contains this member; returns True if it is deferred because the state is missing."""
        self.suspended, self._asks = None, False
        if self.follower is None:
            return False
        self._unseen.append(view)
        self.follower.is_waited_for = True
        return True

    def suspend(self, error: Suspended) -> None:
        """Restarts with another snapshot."""
        self._unseen = []
        self.end(error)
        self.follower, self._asks = self._new_follower(), False
        self._suspensions.append(self._runtime.now())

    def end(self, error: BaseException) -> None:
        """Ends all waits with an error."""
        if self.follower is not None:
            self.follower.end(error)

    # --- asking -----------------------------------------------------------------------------------------------------

    def _ask_to_be_admitted(self) -> None:
        """Starts to ask all members for admission."""
        if self._member.name not in self._roster.view.members:
            self._asks = True
            self._agreement.launch(self.ask())

    async def ask(self, *names: str) -> None:
        """Asks others for the state, and for admission if this member has caught up or cannot.

        A member that was suspended before waits first.
        """
        if (count := len(self._suspensions)) > 1:
            wait_s = min(2.0 ** (count - 2), _BACK_OFF_S)
            await self._runtime.sleep_until(self._suspensions[-1] + wait_s)
        if self.follower is None or self._agreement.error is not None:
            return
        wants = [] if self.follower.is_too_far_behind else [WANT + b"%d" % self.follower.request]
        for name in sorted(self._member.connected.intersection(names or self._member.connected)):
            for text in [*wants, *([ADMIT] if self._asks else [])]:
                self._comm.send(text_payload(text), int(name), TAG, -1)

    async def _seek(self) -> None:
        """Ends a joining member if the members that have the state are silent, or had ended before it came.

        A suspended member waits for their return.
        """
        rounds = 0
        while self.follower is not None and self._agreement.error is None:
            view, began_s = self._roster.view, self._runtime.now()
            self._connections.ask(view.holders[0])
            await self._runtime.sleep_until(began_s + self._agreement.patience_s)
            heard_s = [self._connections.heard.get(x, -math.inf) for x in view.holders[0]]
            if view is not self._roster.view or any(t >= began_s for t in heard_s):
                rounds = 0
                continue
            rounds += 1
            if self.suspended is None or rounds >= BUSY or not self._connections.may_be_back():
                self._cannot_begin()
                return
            self._connections.are_silent(view.holders[0])
            self._connections.await_back(view.holders[0])

    def _is_alone(self) -> bool:
        """Returns True if no member that has the state is connected."""
        return not self._member.connected.intersection(self._roster.view.holders[0])

    async def _miss(self) -> None:
        """Ends a joining member if no member that has the state is connected or reconnects in time."""
        if self._is_alone():
            await self._runtime.sleep_until(
                self._runtime.now() + min(REPAIR_S, self._agreement.patience_s / 2)
            )
        if self.suspended is None and self._is_alone():
            self._cannot_begin()

    def _cannot_begin(self) -> None:
        names = ", ".join(self._roster.view.holders[0])
        self._stop(RunLost(f"rank {self._member.name} cannot begin: members {names} are lost or silent"))

    def cannot_reach(self, rank: int, error: RunLost) -> None:
        """Ends this member because it cannot reach one that has to admit it."""
        members = self._roster.view.members
        if str(rank) in members and self._member.name not in members:
            self._stop(error)

    def _stop(self, error: RunLost) -> None:
        if self.follower is not None and self._agreement.error is None:
            self._agreement.stop(str(error), error)
