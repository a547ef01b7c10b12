"""Exchanges that outlive the loss of members, as the replica that waits for their results sees them."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose, Started, Values
from farflung.membership.agreement import DONE, Agreement
from farflung.membership.connections import TAG, text_payload
from farflung.membership.roster import Roster
from farflung.membership.supervision import Page
from farflung.membership.views import View
from farflung.tasks import Pending
from farflung.types import Change, Runtime

__all__ = ["Elastic"]

T = TypeVar("T")


class Elastic:
    """Makes exchanges again, or adopts their results, where members are lost.

    Exchanges are started in one order on all members, which numbers them. Where a member is lost, the others agree on
    the next view and on the exchanges that any of them holds whole; those that lack one of these adopt its result, and
    all others are made again among the members of the view. Replicas wait meanwhile, and learn of the change alone.

    It belongs to the replica's thread; what it stands for, to the thread that carries exchanges.

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
        ranks = tuple(range(runtime.comm.size) if members is None else members)
        names = tuple(map(str, ranks))
        view = View(int(runtime.comm.rank in ranks), names, (0,), (names,))
        self.roster = Roster(view, Change(first_step, ranks), reach)
        self.agreement = Agreement(
            runtime, key, self.roster, page=page, least=least, quorum=quorum, patience_s=patience_s, returns=returns,
            first_step=first_step, told=told,
        )  # fmt: skip
        self._runtime, self._log = runtime, self.agreement.log
        self.at, self.counted, self.give_back = self.roster.at, self.roster.counted, self.roster.give_back
        """See :class:`farflung.membership.roster.Roster`."""
        self.probe = self.agreement.suspicion.probe
        """See :class:`farflung.membership.suspicion.Suspicion`."""

    # --- members ----------------------------------------------------------------------------------------------------

    @property
    def changes(self) -> list[Change]:
        """The members that take samples, by the step from which on they do."""
        return self.roster.changes

    @property
    def members(self) -> tuple[int, ...]:
        """The members of the newest view, by seniority."""
        return self.roster.members

    @property
    def view_number(self) -> int:
        """The number of the newest view."""
        return self.roster.view.number

    @property
    def interrupted(self) -> Pending[None]:
        """See :class:`farflung.types.Elastic`."""
        return self.agreement.interrupted

    # --- joining ----------------------------------------------------------------------------------------------------

    @property
    def joins(self) -> bool:
        """Whether this member has yet to be given the state of the run."""
        return self.agreement.joins

    @property
    def given_nbytes(self) -> int:
        """Bytes of the state, and of results, that this member was given before it began."""
        return self.agreement.joiner.given_nbytes

    def begin_step(self, step: int) -> bool:
        """Notes that a step begins, and tells replicas that begin at it so.

        Returns:
          Whether a snapshot of the state is to be offered before it; see :meth:`offer`.
        """
        self._log.step = step
        return self.agreement.giver.begin_step(step)

    async def offer(self, step: int, parts: Sequence[Tensor]) -> None:
        """Offers a snapshot of the state before a step to replicas that join.

        Args:
          step: that is about to begin.
          parts: of the snapshot.
        """
        log = self._log
        await self._runtime.launch(self.agreement.giver.offer(step, parts, log.started, log.merged()))

    async def given(self) -> list[Tensor]:
        """Waits for a snapshot of the state of the run, and returns its parts; :meth:`follows` is next.

        Raises:
          RunLost: the members that have the state are lost, or the run has ended.
        """
        return await self._runtime.launch(self.agreement.joiner.receive_state())

    async def follows(self, step: int) -> bool:
        """Waits until a step of the run can be followed, by the results of its exchanges.

        Returns:
          False: this replica begins at it.

        Raises:
          StateOutdated: what was followed is of no use any more: begin anew with :meth:`given`.
          RunLost: as :meth:`given`.
        """
        return await self._runtime.launch(self.agreement.joiner.follows(step))

    # --- exchanges --------------------------------------------------------------------------------------------------

    def start(
        self,
        number: int,
        part: int,
        make: Callable[[ExchangeChannel], Coroutine[Pending[Any], None, T]],
        values: Values[T],
        *,
        rewind: Callable[[], None] | None = None,
        ends_step: bool = False,
    ) -> Started[T]:
        """Starts an exchange; see :func:`farflung.comm.start`."""
        if self.joins:
            return self.agreement.joiner.follow(number, part, make, values)
        return self._log.start(number, part, make, values, rewind, ends_step)

    # --- the end ----------------------------------------------------------------------------------------------------

    def leave(self) -> Pending[None]:
        """Leaves the run: the others go on without this member, which hands over what it alone holds.

        Exchanges fail with :class:`farflung.errors.Left` from then on. Batches of it that are in no update yet are
        taken by the others.

        Returns:
          Completed when it has left, or at the end of the run; fails where it has stopped for another reason.
        """
        left, agreement = Pending[None](), self.agreement

        async def ask() -> None:
            agreement.leaves = left
            if agreement.is_over:
                left.set(None)
            agreement.member.leave()
            agreement.settle_soon()

        self._runtime.launch(ask())
        return left

    def end(self) -> None:
        """Ends this member, whose process ends on an error; on the thread that carries exchanges."""
        if not self.agreement.is_over:
            self.agreement.member.end()

    async def finish(self, steps: int) -> None:
        """Waits until all members have every result, after so many steps; no member is waited for any more."""

        async def meet(channel: ExchangeChannel) -> tuple[Tensor, ...]:
            return await channel.collective("direct")(
                channel, torch.empty(0), torch.zeros(1, dtype=torch.float64)
            )

        agreement = self.agreement

        async def end() -> None:
            agreement.is_over = True
            if agreement.leaves is not None:
                agreement.leaves.set(None)
            for name in sorted(agreement.member.connected):
                self._runtime.comm.send(text_payload(DONE), int(name), TAG, -1)

        if len(self.members) > 1:
            started = self.start(Purpose.LEAVING.at(steps), 0, meet, Values(tuple, tuple))
            agreement.last = None if self.joins else started
            await started.result
        await self._runtime.launch(end())
