"""Exchanges that outlive the loss of members: a driver of :class:`Member` on a runtime, alike in both worlds."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from typing_extensions import override

from farflung.comm import ExchangeChannel, Purpose, Started, Values
from farflung.comm.channel import step_of
from farflung.comm.failure_detector import BUSY, Progress
from farflung.errors import (
    FarflungError,
    Left,
    PeerFailed,
    PeerLost,
    RunLost,
    Suspended,
    WaitEnded,
)
from farflung.membership.among import Among, ViewChannel
from farflung.membership.connections import PROBE, REPAIR_S, TAG, Connections, text_payload
from farflung.membership.joining import NEWS, PIECES, Follower, Result, StateGiver
from farflung.membership.member import Member
from farflung.membership.messages import Malformed, Message, MessageCodec, Report
from farflung.membership.supervision import Page
from farflung.membership.views import View
from farflung.tasks import Pending
from farflung.trees import pack_tensors, unpack_tensors
from farflung.types import Change, Payload, Runtime, Sampler, Tag

__all__ = ["Elastic"]

T = TypeVar("T")

_DONE = b"done"
"""Says that its sender has every result of the run."""
_ANSWER = b"!"
"""Says that its sender is there; its :class:`_Counters` follow."""
_ADMIT = b"again"
"""Asks to be admitted, or admitted again."""
_WANT = b"want "
"""Asks for the state of the run; the number of the request follows."""
_PLAN = b"plan "
"""Says before which step members make a snapshot for a replica: its rank, its request and the step follow."""
_AHEAD = 1
"""How many steps after the one under way a snapshot is made, so that all members can make it of the same state."""
_STUCK = 100
"""For how many times the patience members are waited for that all have come to an exchange, without progress of any."""
_IDLE_S = 1.0
"""After so many seconds without an exchange under way a view admits others."""
_ENTERED = 3
"""After so many steps a view admits others even though some exchange is always under way."""
_BACK_OFF_S = 60.0
"""The most seconds that a member which was suspended again and again waits before it asks to be admitted."""


class _Counters(NamedTuple):
    """How far a member is.

    Args:
      started: the number of exchanges that it has started.
      events: the number of its steps and computations.
      nbytes: bytes of messages to and from it.
    """

    started: int
    events: int
    nbytes: int

    def encode(self) -> bytes:
        return b"%d %d %d" % self

    @staticmethod
    def decode(text: bytes) -> _Counters | None:
        """Returns what a member has told of itself; ``None``: it is malformed."""
        counts = text.split(b" ") if len(text) < 64 else []
        return _Counters(*map(int, counts)) if len(counts) == 3 and all(map(bytes.isdigit, counts)) else None


@dataclass(eq=False, slots=True)
class _Logged(Started[T], Generic[T]):
    """An exchange that may be made again; ``number`` counts the exchanges of the run, alike on all members."""

    elastic: Elastic
    number: int
    exchange: int
    part: int
    make: Callable[[ExchangeChannel], Coroutine[Pending[Any], None, T]] | None = None
    """``None`` once it is whole, so that what was contributed is freed at once."""
    values: Values[T] = field(default_factory=lambda: cast("Values[T]", Values(tuple, tuple)))
    rewind: Callable[[], None] | None = None
    ends_step: bool = False
    begun: int = 0
    """The last step that had begun when it started."""
    made_s: float = math.inf
    """When it was made or asked for, the last time; infinite: not yet."""
    drops: list[_Logged[Any]] = field(default_factory=list)
    """Exchanges whose results all members have, once this one is whole."""
    kept: tuple[Tensor, ...] | None = None
    """The result, for members that lack it; ``None``: the exchange is not whole here."""

    @property
    def step(self) -> int:
        return step_of(self.exchange)

    @override
    async def bring(self) -> T:
        value = await self.result
        self.elastic.taken.append(self)
        return value


class Elastic:
    """Makes exchanges again, or adopts their results, where members are lost.

    Exchanges are started in one order on all members, which numbers them. Where a member is lost, the others agree on
    the next view and on the exchanges that any of them holds whole; those that lack one of these adopt its result, and
    all others are made again among the members of the view. Replicas wait meanwhile, and learn of the change alone.

    It belongs to the thread that carries exchanges, but for :meth:`start`, :meth:`finish` and :meth:`at`.

    Args:
      runtime: the world; its view is not whole.
      key: a secret of the run, which signs certificates.
      page: takes the reports that a supervisor reads after this process's end; ``None``: it has no supervisor.
      least: the number of members with less of which the run ends.
      quorum: ``"majority"``, or ``"1"``: members without a majority go on too, each part with a model of its own.
      patience_s: seconds without a sign of life after which a member that is waited for is left out, and for which to
        wait for an agreement.
      returns: whether this member asks to be admitted again where the others went on without it (:meth:`given`). Its
        exchanges fail with :class:`farflung.errors.Suspended` first.
      first_step: of the run.
      reach: the most steps that a member begins after the last one whose exchanges are all there.
      members: the ranks that are there at the start; all when not given. One that is not among them asks to join.
      told: is told of the members of each new view, by seniority.
    """

    def __init__(
        self,
        runtime: Runtime,
        key: bytes,
        *,
        page: Page | None = None,
        least: int = 1,
        quorum: str = "majority",
        patience_s: float = 60.0,
        returns: bool = False,
        first_step: int = 0,
        reach: int = 1,
        members: Sequence[int] | None = None,
        told: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        comm = runtime.comm
        ranks = tuple(range(comm.size) if members is None else members)
        self._runtime, self._comm, self._least, self._patience_s = runtime, comm, least, patience_s
        self._reach, self._told = reach, told
        self.met: Callable[[int], None] | None = None
        """Is told of the rank of each process that is connected after the start."""
        self._returns = returns and quorum != "1"
        self._page = page
        self._codec = MessageCodec(key)
        names = tuple(map(str, ranks))
        self.joins = comm.rank not in ranks
        """Whether this member has yet to be given the state of the run."""
        self._view = View(0 if self.joins else 1, names, (0,), (names,))
        first = None if self.joins else self._view
        self._member = Member(
            str(comm.rank), self, self._codec.certify, first, quorum=1 if quorum == "1" else "majority"
        )
        self._member.connected.update(set(names) - {str(comm.rank)})
        self.step = first_step
        """The last step that has begun here."""
        self.changes = [Change(first_step, ranks)]
        """The members that take samples, by the step from which on they do."""
        self._begins: dict[int, int] = {}
        """The first step of each member that has joined."""
        self.given_nbytes = 0
        """Bytes of the state, and of results, that this member was given before it began."""
        self._giver = StateGiver(runtime, self._view_news)
        self._follower = self._new_follower() if self.joins else None
        """Fetches the state of the run; ``None`` once this member has begun."""
        self._unseen: list[View] = []
        """Views that were installed before the state was there."""
        self.taken: list[_Logged[Any]] = []
        self._started = 0
        self._log: dict[int, _Logged[Any]] = {}
        self._base, self._complete = 0, {0: first_step - 1}
        """The number up to which all exchanges are whole, and the steps that end with an exchange, by its number."""
        self._frozen = self._settling = self._over = self._others_ended = False
        self._admits_s, self._entered = math.inf, 0
        """When a view admits others at the latest, and how many steps have started since it may."""
        self._connections = Connections(
            runtime, self._member, lambda: self._view, patience_s, self._returns, self._settle_soon
        )
        self._answers: dict[str, int] = {}
        """How many exchanges each member had started when it answered last."""
        self._progress: dict[str, Progress] = {}
        """Of each member, this one too, as it has answered."""
        self._waits: Pending[None] = Pending()
        """Done once an exchange is waited for."""
        self.interrupted = Pending[None]()
        """Fails once this member has left, the run has ended here, or it goes on without this member; another one then
        stands for the next membership."""
        self._suspended: Suspended | None = None
        """Why exchanges fail, until this member is admitted again."""
        self._suspensions: list[float] = []
        """When this member was suspended."""
        self._asks = self._seeks = False
        """Whether it asks to be admitted, and whether it looks for members that have the state."""
        self._known = set(names)
        """All that have been members."""
        self._last: _Logged[Any] | None = None
        self._leaves: Pending[None] | None = None
        """When this member has left; ``None``: it was not asked to."""
        self._ended: FarflungError | None = None
        if comm.size > 1:
            self._in_background(self._listen())
            self._in_background(self._welcome())  # first: all that has come before may be gone since
            self._in_background(self._watch())
            self._in_background(self._attend())
            self._in_background(self._giver.serve())
            self._in_background(self._hear_news())
            self._in_background(self._take_pieces())

    def _in_background(self, work: Coroutine[Pending[Any], None, None]) -> None:
        """Start work that nothing waits for; the run stops by name where it fails."""

        def ended(task: Pending[None]) -> None:
            if isinstance(error := task.error, Exception) and not isinstance(error, FarflungError):
                logging.getLogger("farflung").error("the agreement on members failed", exc_info=error)
                self.stop(f"the agreement on members failed: {type(error).__name__}: {error}")

        self._runtime.launch(work).on_done(ended)

    @property
    def view(self) -> View:
        """The newest view that is installed."""
        return self._view

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the newest view, by seniority."""
        return tuple(map(int, self._view.members))

    @property
    def view_number(self) -> int:
        """The number of the newest view."""
        return self._view.number

    @property
    def has_begun(self) -> bool:
        """Whether this member has, or had, the state of the run."""
        return not self.joins or bool(self._suspensions)

    def at(self, step: int) -> Change:
        """Return the change that is in force at a step."""
        return next((one for one in reversed(self.changes) if one.step <= step), self.changes[0])

    def counted(self, step: int) -> int:
        """Return the number of batches that a step adds to those that all members have taken, less those given back."""
        return len(self.at(step).ranks) - len(self._given_back(step))

    def give_back(self, step: int, sampler: Sampler) -> None:
        """Return the samples of lost members to a sampler, where a change takes effect at a step."""
        for before, place in self._given_back(step):
            sampler.give_back(before, place)

    def _given_back(self, step: int) -> list[tuple[int, int]]:
        """Return which batches are given back at a step: the step that they were taken at, and the place in it."""
        if all(change.step != step for change in self.changes):
            return []
        return [
            (before, self.at(before).ranks.index(rank))
            for (before, rank), change in self._lost_batches().items()
            if change.step == step
        ]

    def _lost_batches(self) -> dict[tuple[int, int], Change]:
        """Return the change that gives back a batch, by the step that it was taken at and the rank."""
        first_last = sorted(self.changes, key=lambda change: (change.step, change.view), reverse=True)
        return {
            (before, rank): change
            for change in first_last  # the first counts
            for before in change.again
            for rank in change.lost
            if rank in self.at(before).ranks
        }

    # --- joining ----------------------------------------------------------------------------------------------------

    def begin_step(self, step: int) -> bool:
        """Note that a step begins, and tell replicas that begin at it so.

        Returns:
          Whether a snapshot of the state is to be offered before it; see :meth:`offer`.
        """
        self.step = step
        if self._begins.get(self._comm.rank) == step:
            return False  # the others have told all that begin at it
        joiners = self._joiners(step)
        if followers := set(joiners).intersection(self._giver.ranks):
            self._in_background(self._let_begin(sorted(followers), step, self._started))
        return bool(self._giver.due(step)) or any(rank not in self._giver.ranks for rank in joiners)

    def _joiners(self, step: int) -> list[int]:
        """Return the ranks that begin at a step."""
        return [rank for rank in self.at(step).ranks if self._begins.get(rank, -1) == step]

    async def offer(self, step: int, parts: Sequence[Tensor]) -> None:
        """Offer a snapshot of the state before a step to replicas that join.

        Args:
          step: that is about to begin.
          parts: of the snapshot.
        """
        merged = [*self.taken, *(one for logged in self._log.values() for one in logged.drops)]
        await self._runtime.launch(self._offer(step, parts, self._started, set(map(id, merged))))

    async def _offer(self, step: int, parts: Sequence[Tensor], started: int, merged: set[int]) -> None:
        needed = [one for one in self._log.values() if id(one) not in merged and one.number <= started]
        ranks = {*self._giver.due(step), *set(self._joiners(step)).difference(self._giver.ranks)}
        begin_now = sorted(ranks.intersection(self._joiners(step)))
        self._giver.offer(ranks, step, parts, {one.number for one in needed}, started)
        for logged in needed:
            if logged.kept is not None:
                self._keep(logged)
        if begin_now:
            await self._let_begin(begin_now, step, started)

    async def _let_begin(self, ranks: Sequence[int], step: int, started: int) -> None:
        """Tell replicas what they begin with, once all exchanges are whole that started before.

        These are the results that a member may lack, so that they can hand these over as any other member can.
        """
        before = [logged for logged in self._log.values() if logged.number <= started]
        for logged in before:
            await logged.result
        log = [one for one in self._log.values() if one.number <= started]
        begins = {
            "step": step,
            "started": started,
            "auto": [*self._comm.auto.items()],
            "complete": [each for each in self._complete.items() if each[0] <= started],
            "log": [one.number for one in log],
        }
        results = [_result(one) for one in log]
        for rank in ranks:
            if rank in self.members and self._begins.get(rank) == step:
                self._giver.let_begin(rank, begins, results)

    def _keep(self, logged: _Logged[Any]) -> None:
        """Keep a result for replicas that follow."""
        least = min(self._log, default=self._started + 1)
        self._giver.add(_result(logged), least, self.members)

    def _plan_snapshots(self) -> None:
        """Name the step before which members make a snapshot for replicas that want one; one member alone does."""
        names = [int(name) for name in self._view.members]
        first = next((rank for rank in names if self._begins.get(rank, -1) <= self.step), None)
        if self.joins or first != self._comm.rank:
            return
        for rank, request in self._giver.unplanned():
            step = self.step + _AHEAD
            self._giver.plan(rank, request, step)
            text = _PLAN + b"%d %d %d" % (rank, request, step)
            for other in sorted(self._member.connected.intersection(self._view.members)):
                self._comm.send(text_payload(text), int(other), TAG, -1)

    def _view_news(self) -> dict[str, Any]:
        """Return what replicas that follow are told of the newest view."""
        view = self._view
        return {
            "number": view.number,
            "members": self.members,
            "newest": view.newest,
            "changes": [[*one[:4], [one.again.start, one.again.stop], *one[5:]] for one in self.changes],
        }

    def _new_follower(self) -> Follower:
        return Follower(
            self._runtime,
            lambda: self._in_background(self._ask()),
            self._ask_to_be_admitted,
            self._cannot_begin,
            self._take_changes,
        )

    def _ask_to_be_admitted(self) -> None:
        if self._member.name not in self._view.members:
            self._asks = True
            self._in_background(self._ask())

    def _take_changes(self, changes: Sequence[Any]) -> None:
        self.changes = [
            Change(step, tuple(ranks), tuple(lost), tuple(joined), range(*again), t, view)
            for step, ranks, lost, joined, again, t, view in changes
        ]
        for change in self.changes:
            self._begins.update(dict.fromkeys(change.joined, change.step))

    async def given(self) -> list[Tensor]:
        """Wait for a snapshot of the state of the run, and return its parts; :meth:`follows` is next.

        Raises:
          RunLost: the members that have the state are lost, or the run has ended.
        """
        return await self._runtime.launch(self._given())

    async def _given(self) -> list[Tensor]:
        if (ended := self._ended) is not None:
            raise ended
        assert self._follower is not None
        if not self._seeks:
            self._seeks = True
            self._in_background(self._seek())
        self._in_background(self._ask())
        return await self._follower.snapshot()

    async def follows(self, step: int) -> bool:
        """Wait until a step of the run can be followed, by the results of its exchanges.

        Returns:
          False: this replica begins at it.

        Raises:
          StateOutdated: what was followed is of no use any more: begin anew with :meth:`given`.
          RunLost: as :meth:`given`.
        """
        return await self._runtime.launch(self._follows(step))

    async def _follows(self, step: int) -> bool:
        assert self._follower is not None
        self.step = step
        begins = await self._follower.follows(step)
        if begins is not None:
            self._begin(begins)
        return begins is None

    def _begin(self, begins: Mapping[str, Any]) -> None:
        """Take part from now on, with all that is whole."""
        follower, self._follower, self.joins, self._seeks = self._follower, None, False, False
        assert follower is not None
        self.given_nbytes = follower.nbytes
        self._started = self._base = begins["started"]
        self._comm.auto = dict(begins["auto"])
        self._complete = dict(begins["complete"])
        self.taken = [logged for logged in self.taken if logged.number in begins["log"]]
        for number in begins["log"]:
            if number not in follower.results:
                continue  # all members have it
            logged = follower.followed.get(number)
            if logged is None:  # this replica had no use for it
                exchange, part = follower.exchange_of(number)
                channel: Any = ExchangeChannel(self._comm, exchange, part)
                logged = _Logged[Any](channel, Pending(), self, number, exchange, part)
                self.taken.append(logged)
            logged.kept, logged.make, logged.rewind = follower.results[number], None, None
            self._log[number] = logged
        told_of = self.changes[-1].view
        for before, view in pairwise(self._unseen):
            if view.number > told_of:
                self._change(before.members, view)

    async def _hear_news(self) -> None:
        while True:
            source, payload = await self._comm.recv_any(NEWS, deadline_s=math.inf)
            if self._follower is not None:
                with self._refusing(source):
                    self._follower.hear(source, bytes(next(payload.tensors()).numpy()))

    async def _take_pieces(self) -> None:
        while True:
            source, payload = await self._comm.recv_any(PIECES, deadline_s=math.inf)
            if self._follower is not None:
                with self._refusing(source):
                    head, piece = payload.tensors()
                    self._follower.take(source, bytes(head.numpy()), piece)

    @contextmanager
    def _refusing(self, source: int) -> Iterator[None]:
        """Inside, what is malformed loses its sender."""
        try:
            yield
        except (ValueError, KeyError, TypeError, AttributeError):
            self._lose_malformed(str(source))

    def _lose_malformed(self, name: str) -> None:
        self._connections.malformed.add(name)
        self._member.lost(name)
        self._settle_soon()

    # --- exchanges ------------------------------------------------------------------------------------------------

    def start(
        self,
        number: int,
        part: int,
        make: Callable[[ExchangeChannel], Coroutine[Pending[Any], None, T]],
        values: Values[T],
        *,
        rewind: Callable[[], None] | None = None,
        ends_step: bool = False,
        last: bool = False,
    ) -> Started[T]:
        """Start an exchange; see :func:`farflung.comm.start`. The ``last`` of a run is whole once any member ends."""
        channel, result = ExchangeChannel(self._comm, number, part), Pending[T]()
        if self.joins:
            followed = _Logged(channel, result, self, 0, number, part, make, values)
            self._in_background(self._follow(followed))
            return followed
        self._started += 1
        drops, self.taken = self.taken, []
        at = self._started, number, part
        logged = _Logged(
            channel, result, self, *at, make, values, rewind, ends_step, begun=self.step, drops=drops
        )
        self._last = logged if last else None
        self._in_background(self._enter(logged))
        return logged

    async def _follow(self, logged: _Logged[Any]) -> None:
        if self._follower is None:
            logged.result.fail(self._ended or Suspended("it was started before this replica began"))
            return
        self.taken = [one for one in self.taken if one.number in self._follower.followed]
        self._follower.follow(logged)

    def leave(self) -> Pending[None]:
        """Leave the run: the others go on without this member, which hands over what it alone holds.

        Exchanges fail with :class:`farflung.errors.Left` from then on. Batches of it that are in no update yet are
        taken by the others.

        Returns:
          Completed when it has left, or at the end of the run; fails where it has stopped for another reason.
        """
        left = Pending[None]()

        async def ask() -> None:
            self._leaves = left
            if self._over or self._ended is not None:
                left.set(None)
            self._member.leave()
            self._settle_soon()

        self._runtime.launch(ask())
        return left

    def end(self) -> None:
        """End this member, whose process ends on an error; on the thread that carries exchanges."""
        if not self._over and self._ended is None:
            self._member.end()

    async def finish(self, steps: int) -> None:
        """Wait until all members have every result, after so many steps; no member is waited for any more."""

        async def meet(channel: ExchangeChannel) -> tuple[Tensor, ...]:
            return await channel.collective("direct")(
                channel, torch.empty(0), torch.zeros(1, dtype=torch.float64)
            )

        if len(self._view.members) > 1:
            await self.start(Purpose.LEAVING.at(steps), 0, meet, Values(tuple, tuple), last=True).result
        await self._runtime.launch(self._end())

    async def _end(self) -> None:
        self._over = True
        if self._leaves is not None:
            self._leaves.set(None)
        for name in sorted(self._member.connected):
            self._comm.send(text_payload(_DONE), int(name), TAG, -1)

    async def _enter(self, logged: _Logged[Any]) -> None:
        if (ended := self._ended or self._suspended) is not None:
            logged.result.fail(ended)
            return
        self._log[logged.number] = logged
        if logged.ends_step:
            self._complete[logged.number] = logged.step
        view = self._view
        if self._admits_s < math.inf and not self._frozen:
            self._entered += logged.ends_step
            if not self._waited() or self._entered > _ENTERED:
                await self._settle(between=True)
        await self._make(logged, view)  # in a view that this has installed it is made already

    async def _make(self, logged: _Logged[Any], view: View) -> None:
        if self._frozen or view is not self._view:  # it is made in the next view
            return
        assert logged.make is not None
        self._is_waited_for(logged)
        try:
            value = await logged.make(
                ViewChannel(self._among(logged), logged.channel, lambda: self._view is view)
            )
        except (PeerLost, PeerFailed, WaitEnded) as error:
            rank = getattr(error, "rank", None)
            if view is self._view and isinstance(rank, int) and not isinstance(error, WaitEnded):
                self._member.lost(str(rank))
                self._settle_soon()
        except Exception as error:
            logged.result.fail(error)
        else:
            if view is self._view and not self._frozen:
                self._has(logged, value)

    async def _adopt(self, logged: _Logged[Any], view: View, giver: int) -> None:
        if self._frozen or view is not self._view:
            return
        self._is_waited_for(logged)
        try:
            payload = await self._comm.recv(
                giver, Tag(Purpose.ADOPTION.at(logged.number)), deadline_s=math.inf
            )
        except (PeerLost, PeerFailed, WaitEnded):
            if view is self._view and str(giver) not in view.members:
                self._member.redo()  # one that has left was lost before it had handed over
                self._settle_soon()
            return
        if view is self._view and not self._frozen:
            (content,) = payload.tensors()
            self._has(logged, logged.values.unpack(unpack_tensors(content)))

    def _has(self, logged: _Logged[Any], value: Any) -> None:
        """Hold an exchange whole."""
        logged.kept = tuple(tensor.clone() for tensor in logged.values.pack(value))
        logged.make = logged.rewind = None
        if ranks := self._giver.ranks:
            begun = [rank for rank in ranks if logged.begun >= self._begins.get(rank, math.inf)]
            self._giver.close(set(begun).intersection(self.members))
            if self._giver.ranks:
                self._keep(logged)
        while (later := self._log.get(self._base + 1)) is not None and later.kept is not None:
            self._base += 1
        for dropped in logged.drops:
            self._log.pop(dropped.number, None)
        logged.drops.clear()  # else each exchange would keep all before it
        known = [number for number in self._complete if number <= self._base]
        for number in sorted(known)[:-1]:
            del self._complete[number]
        logged.result.set(value)

    # --- silent and busy members ------------------------------------------------------------------------------------

    def _is_waited_for(self, logged: _Logged[Any]) -> None:
        logged.made_s = self._runtime.now()
        self._waits.set(None)

    def _waited(self) -> list[_Logged[Any]]:
        """Return the exchanges that have been made, or asked for, and are not whole."""
        return [one for one in self._log.values() if one.kept is None and one.made_s < math.inf]

    async def _attend(self) -> None:
        """Ask members for a sign of life where an exchange takes long, and leave out those that give none.

        The questions begin at half of the patience, one in each quarter. A member is silent where for all of the
        patience nothing of it has arrived, not even a part of a message. One that is busy answers, since the thread
        that carries exchanges does.
        """
        while not self._over and self._ended is None:
            waited = self._waited()
            if self._frozen or not waited:
                self._waits = Pending()
                await self._waits
                continue
            oldest = min(waited, key=lambda one: one.number)
            begins_s = oldest.made_s + self._patience_s / 2
            if self._runtime.now() < begins_s:
                await self._runtime.sleep_until(begins_s)
                continue
            await self._judge(self._view, oldest)

    async def _judge(self, view: View, oldest: _Logged[Any]) -> None:
        """Ask members for a sign of life, and leave out those that are silent or busy for too long."""
        asked = await self._connections.asked(self._patience_s / 4)
        if view is not self._view or self._frozen or oldest.kept is not None:
            return
        waits_s = self._runtime.now() - max(oldest.made_s, self._connections.awake_s)
        why = {
            name: f"nothing has arrived from it for {silent_s:.2f} s"
            for name in asked
            if (silent_s := min(self._connections.silent_s(name), waits_s)) >= self._patience_s
        }
        self._note_progress(self._member.name, self._counters())
        least = min((self._answers.get(name, 0) for name in asked), default=oldest.number)
        late = {name for name in asked if self._answers.get(name, 0) == least < oldest.number}
        idle_s = min(waits_s, self._idle_s(late or {*asked, self._member.name}))
        if not why and late and idle_s >= BUSY * self._patience_s:
            reason = f"it answers, but has not come to that exchange, nor made progress for {idle_s:.2f} s"
            why = dict.fromkeys(late, reason)
        elif not late and idle_s >= _STUCK * self._patience_s:
            self.stop(
                f"exchange {oldest.number} is not whole after {waits_s:.0f} s, and nothing has moved for "
                f"{idle_s:.0f} s, but all members answer"
            )
        for name in sorted(why):
            logging.getLogger("farflung").warning(
                "rank %s counts as lost: %s (exchange %d, step %d, is %.2f s old)",
                name,
                why[name],
                oldest.number,
                oldest.step,
                waits_s,
            )
        self._connections.are_silent(why)

    def _counters(self) -> _Counters:
        return _Counters(self._started, self._runtime.events, self._comm.moved_nbytes())

    def _note_progress(self, name: str, counters: _Counters) -> None:
        """Notes how far a member is."""
        now = self._runtime.now()
        progress = self._progress.setdefault(name, Progress(now))
        progress.update(counters.started + counters.events, counters.nbytes, now, self._patience_s)

    def _idle_s(self, names: Collection[str]) -> float:
        """Returns for how many seconds none of some members has made progress, as far as is known."""
        moved_s = (self._progress[name].last_s for name in names if name in self._progress)
        return self._runtime.now() - max(moved_s, default=-math.inf)

    async def probe(self) -> None:
        """Leave out the members of the newest view that give no sign of life for all of the patience."""
        view = self._view
        asked = await self._connections.asked(self._patience_s)
        if view is self._view and not self._frozen and not self._over:
            silent_s = self._connections.silent_s
            self._connections.are_silent(name for name in asked if silent_s(name) >= self._patience_s)

    async def _hear_all(self, view: View) -> None:
        """Take members for lost that do not answer while a view ends.

        One that has given no sign of life for three quarters of the patience is lost at once: it was asked already.
        """
        waits_s = self._runtime.now() - min((one.made_s for one in self._waited()), default=math.inf)
        names = self._member.connected.intersection(view.members)
        silent_s, patience_s = self._connections.silent_s, self._patience_s
        self._connections.are_silent(x for x in names if min(silent_s(x), waits_s) >= 0.75 * patience_s)
        asked = await self._connections.asked(patience_s / 2)
        if view is self._view and not self._over:
            self._connections.are_silent(name for name in asked if silent_s(name) >= patience_s / 2)

    def suspend(self, view: View) -> bool:
        self._suspended = Suspended(
            f"view {view.number} is without this replica, which the others did not hear"
        )
        if not self._returns or self._ended is not None:
            return False
        logging.getLogger("farflung").warning("%s: it asks to be admitted again", self._suspended)
        self.joins, self._view, self._unseen = True, view, []
        self._known.update(view.members)
        self._giver.close(self._giver.ranks)
        if self._follower is not None:
            self._follower.end(self._suspended)
        self._follower, self._asks = self._new_follower(), False
        for logged in self._log.values():
            logged.result.fail(self._suspended)
        interrupted, self.interrupted = self.interrupted, Pending()
        interrupted.fail(self._suspended)
        self._log.clear()
        self.taken.clear()
        self._suspensions.append(self._runtime.now())
        self._connections.await_back(view.members)
        return True

    async def _ask(self, *names: str) -> None:
        """Ask others for the state, and to admit this member where it has caught up, or cannot.

        A member that was suspended before asks later.
        """
        if (count := len(self._suspensions)) > 1:
            wait_s = min(2.0 ** (count - 2), _BACK_OFF_S)
            await self._runtime.sleep_until(self._suspensions[-1] + wait_s)
        if self._follower is None or self._ended is not None:
            return
        wants = [] if self._follower.is_too_far_behind else [_WANT + b"%d" % self._follower.request]
        texts = [*wants, *([_ADMIT] if self._asks else [])]
        for name in sorted(self._member.connected.intersection(names or self._member.connected)):
            for text in texts:
                self._comm.send(text_payload(text), int(name), TAG, -1)

    # --- effects of the agreement -----------------------------------------------------------------------------------

    def send(self, name: str, message: Message) -> None:
        self._comm.send(text_payload(self._codec.encode(message)), int(name), TAG, -1)

    def keep(self, report: Report) -> None:
        if self._page is not None:
            self._page.keep(self._codec.encode(report))

    def freeze(self) -> tuple[int, ...]:
        self._frozen = True
        if self._others_ended:
            self._ends_without()
        if self.joins:
            return ()
        self._in_background(self._lose_patience(self._view))
        self._in_background(self._hear_all(self._view))
        return (
            self._base,
            *sorted(n for n, one in self._log.items() if n > self._base and one.kept is not None),
        )

    def install(self, view: View) -> None:
        before, self._view, self._frozen = self._view, view, False
        self._suspended, self._asks = None, False
        self._known.update(view.members)
        self._comm.advance(view.number)
        self._connections.await_back(set(before.members).difference(view.members))
        if self.joins:
            self._unseen.append(view)
            if self._follower is not None:
                self._follower.is_waited_for = True
            if self._told is not None:
                self._told(self.members)
            return
        if len(view.members) < self._least:
            self.stop(f"view {view.number} has {len(view.members)} members, and the run needs {self._least}")
            return
        if view.number > self.changes[-1].view:
            self._change(before.members, view)
        self._giver.close(int(name) for name in before.members if name not in view.members)
        self._giver.tell_view()
        self._plan_snapshots()
        if self._told is not None:
            self._told(self.changes[-1].ranks)
        givers = {x.exchange: int(x.giver) for x in view.transfers() if x.receiver == self._member.name}
        missing = [one for _, one in sorted(self._log.items()) if one.kept is None]
        for logged in reversed(missing):
            if logged.rewind is not None and logged.number not in givers:
                logged.rewind()
        for logged in missing:
            giver = givers.get(logged.number)
            work = self._make(logged, view) if giver is None else self._adopt(logged, view, giver)
            self._in_background(work)

    def hand(self, view: View) -> None:
        if self._view.number < view.number:  # a member that leaves does not install the view
            self._comm.advance(view.number)
        for giver, receiver, number in view.transfers():
            # A member without the state asks for it.
            if giver == self._member.name and receiver in view.holders[0]:
                kept = self._log[number].kept
                assert kept is not None
                self._comm.send(
                    Payload((pack_tensors(kept),)), int(receiver), Tag(Purpose.ADOPTION.at(number))
                )

    def stop(self, reason: str, error: RunLost | None = None) -> None:
        self._ended = error or (Left(reason) if self._member.left else RunLost(reason))
        if self._leaves is not None:
            self._leaves.set(None) if self._member.left else self._leaves.fail(self._ended)
        self.interrupted.fail(self._ended)
        if self._follower is not None:
            self._follower.end(self._ended)
        for logged in self._log.values():
            logged.result.fail(self._ended)

    def _change(self, before: Sequence[str], view: View) -> None:
        """Note from which step on the members of a view take samples."""
        lost, joined = (
            tuple(int(name) for name in names if name not in others)
            for names, others in ((before, view.members), (view.members, before))
        )
        whole, newest = view.newest[0], set(view.newest)
        while whole + 1 in newest:
            whole += 1
        done = max(step for number, step in self._complete.items() if number <= whole)
        ranks = tuple(map(int, view.members))
        # Further steps need exchanges of the new view, so no member has begun them; all members of it have by then.
        begins = max((self._begins.get(rank, 0) for rank in ranks if rank not in joined), default=0)
        again = range(done + 1, max(done + 1 + self._reach, begins))
        # A member that was lost before counts where steps are made again that a result of it was to complete.
        known = self._lost_batches()
        taken = {
            (step, rank) for step in again for rank in self.at(step).ranks if rank not in (*ranks, *lost)
        }
        lost += tuple(sorted({rank for _, rank in taken.difference(known)}))
        change = Change(again.stop, ranks, lost, joined, again, self._runtime.now(), view.number)
        self.changes.append(change)
        self._begins.update(dict.fromkeys(joined, change.step))

    def _among(self, logged: _Logged[Any]) -> Among:
        """Return the communicator of those members that take part in an exchange, which begin at its step or before."""
        begins = self._begins
        return Among(
            self._comm, [r for r in map(int, self._view.members) if begins.get(r, 0) <= logged.begun]
        )

    # --- events -----------------------------------------------------------------------------------------------------

    async def _listen(self) -> None:
        while True:
            source, payload = await self._comm.recv_any(TAG, deadline_s=math.inf)
            (text,) = payload.tensors()
            self._hear(str(source), bytes(text.numpy()))

    def _hear(self, source: str, text: bytes) -> None:
        if source in self._connections.malformed:
            return
        if self._connections.hear(source):
            self._in_background(self._ask(source))
        if text == PROBE:
            self._comm.send(text_payload(_ANSWER + self._counters().encode()), int(source), TAG, -1)
        elif text == _ADMIT:
            self._member.guest(source)
        elif text.startswith((_WANT, _PLAN)):
            self._hear_plan(source, text)
            return
        elif text.startswith(_ANSWER):
            if (counters := _Counters.decode(text[1:])) is not None:
                self._answers[source] = counters.started
                self._note_progress(source, counters)
        elif text == _DONE:
            self._ends_without()
            return
        else:
            try:
                message = self._codec.decode(text)
            except Malformed:
                self._lose_malformed(source)
            else:
                if self.joins and isinstance(message, Report):
                    self._hear_of(message.view)
                self._member.hear(source, message)
        self._settle_soon()

    def _hear_plan(self, source: str, text: bytes) -> None:
        numbers = text[len(_WANT) :].split(b" ")
        if not all(map(bytes.isdigit, numbers)) or len(numbers) != (1 if text.startswith(_WANT) else 3):
            self._lose_malformed(source)
        elif text.startswith(_WANT):
            if source in self._view.members and self._begins.get(int(source), math.inf) <= self.step:
                self._giver.refuse(int(source))
            else:
                self._giver.want(int(source), int(numbers[0]))
                self._plan_snapshots()
        else:
            self._giver.plan(*map(int, numbers))

    def _hear_of(self, view: View) -> None:
        """Hear of a view that has not admitted this member: its members are those to be reached from now on."""
        if view.number > self._view.number and view.holders and self._member.name not in view.members:
            self._view = view
            self._known.update(view.members)

    def _ends_without(self) -> None:
        """End where another member has every result of the run."""
        self._others_ended = True
        if self._last is not None:
            self._over = True
            self._last.result.set(())
        elif not self.has_begun:
            why = "the run has ended before this replica could begin"
            self.stop(why, Left(why))
        elif self.joins or self._frozen:
            self.stop("the run has ended before this replica could return")

    def certified(self, text: bytes) -> None:
        """Hear the supervisor's certificate of another process; on the thread that carries exchanges."""
        self._member.hear("", self._codec.decode(text))
        self._settle_soon()

    async def _welcome(self) -> None:
        while True:
            name = str(await self._comm.arrival())
            if name not in self._connections.malformed:
                self._connections.come(name)
                if self.met is not None:
                    self.met(int(name))
                self._in_background(self._ask(name))
                self._giver.greet(int(name))
                if self._follower is not None:
                    self._follower.ask_again(int(name))
                self._settle_soon()

    async def _watch(self) -> None:
        while True:
            name = str(await self._comm.departure())
            if not self._connections.go(name):
                continue
            if self._follower is not None:
                self._follower.drop(int(name))
                self._connections.await_back([name])
                self._in_background(self._miss())
            if int(name) in self._giver.ranks:
                self._in_background(self._keep_offer(name))
            if self._over or self._ended is not None:
                continue
            if self._suspended is not None or (name in self._known and name not in self._view.members):
                self._connections.await_back([name])
            self._settle_soon()

    async def _keep_offer(self, name: str) -> None:
        """Connect again to a replica that follows, and keep what it is offered while it may be back."""
        self._connections.await_back([name])
        await self._runtime.sleep_until(self._runtime.now() + BUSY * self._patience_s)
        if name not in self._member.connected:
            self._giver.close([int(name)])

    async def _seek(self) -> None:
        """End a member that joins where those that have the state are silent, or had ended before it came.

        One that was suspended waits for them to be back.
        """
        rounds = 0
        while self.joins and self._ended is None:
            view, began_s = self._view, self._runtime.now()
            self._connections.ask(view.holders[0])
            await self._runtime.sleep_until(began_s + self._patience_s)
            heard = [self._connections.heard.get(x, -math.inf) for x in view.holders[0]]
            if view is not self._view or any(t >= began_s for t in heard):
                rounds = 0
                continue
            rounds += 1
            if self._suspended is None or rounds >= BUSY or not self._connections.may_be_back():
                self._cannot_begin()
                return
            self._connections.are_silent(view.holders[0])
            self._connections.await_back(view.holders[0])

    async def _miss(self) -> None:
        """End a member that joins where no member that has the state is connected, or is again in time."""
        if not self._member.connected.intersection(self._view.holders[0]):
            await self._runtime.sleep_until(self._runtime.now() + min(REPAIR_S, self._patience_s / 2))
        if self._suspended is None and not self._member.connected.intersection(self._view.holders[0]):
            self._cannot_begin()

    def _cannot_begin(self) -> None:
        if self.joins and self._ended is None:
            lost = ", ".join(self._view.holders[0])
            self.stop(f"rank {self._member.name} cannot begin: members {lost} are lost or silent")

    def forget(self, rank: int) -> None:
        """Keep nothing for a process that asked to join, since another has its rank; on the thread of exchanges."""
        self._giver.close([rank])

    def cannot_reach(self, rank: int, error: RunLost) -> None:
        """End a member that joins where it cannot reach one that has to admit it; on the thread of exchanges."""
        members = self._view.members
        if self.joins and self._ended is None and str(rank) in members and self._member.name not in members:
            self.stop(str(error), error)

    def _settle_soon(self) -> None:
        """Let the member act once all that has arrived is heard."""
        if not self._settling:
            self._settling = True
            self._in_background(self._settle())

    async def _settle(self, *, between: bool = False) -> None:
        """Let the member act now.

        Args:
          between: whether no exchange is under way. A view waits for this to admit others, for half of the patience at
            most, since what is under way is made again.
        """
        self._settling, now = False, self._runtime.now()
        if self._over or self._ended is not None:
            return
        if not self._member.has_candidates:
            self._admits_s = math.inf
        elif self._admits_s == math.inf:
            self._admits_s, self._entered = now + self._patience_s / 2, 0
            self._connections.settle_at(self._admits_s)
            self._in_background(self._settle_idle(now + min(_IDLE_S, self._patience_s / 8)))
        self._member.settle(ready=not self._connections.repair(), admits=between or now >= self._admits_s)
        if self._connections.more_cuts():
            self._settle_soon()

    async def _settle_idle(self, seconds: float) -> None:
        """Let the member act at a time, as between exchanges where none is under way here."""
        await self._runtime.sleep_until(seconds)
        await self._settle(between=not self._waited())

    async def _lose_patience(self, view: View) -> None:
        """Give up an agreement where nothing has become known of the view for as long as patience lasts.

        A member that may return waits for others to be back for as long as for one that is busy, unless all of their
        processes have ended.
        """
        ballot, since_s = -1, self._runtime.now()
        while self._frozen and self._view is view and not self._over and self._ended is None:
            now = self._runtime.now()
            if ballot != self._member.ballot:
                ballot, since_s = self._member.ballot, now
            elif not self._connections.may_be_back() or now >= since_s + BUSY * self._patience_s:
                self._member.give_up()
                return
            await self._runtime.sleep_until(now + self._patience_s)


def _result(logged: _Logged[Any]) -> Result:
    assert logged.kept is not None
    return Result(logged.number, logged.exchange, logged.part, logged.begun, pack_tensors(logged.kept))
