"""Exchanges that survive the loss of members, as seen by the replica that waits for their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose, ResultCodec
from farflung.membership.agreement import RUN_COMPLETE, Agreement
from farflung.membership.connections import TAG, build_payload
from farflung.membership.roster import Roster
from farflung.membership.supervision import Page
from farflung.membership.views import View
from farflung.tasks import Pending
from farflung.types import Change, Runtime

__all__ = ["PaxosMembership"]


class PaxosMembership:
    """Runner of exchanges that are repeated, or whose results are adopted, after the loss of members.

    All members start exchanges in one order, which numbers them. After a loss, the others agree on the next view and
    on the exchanges that any of them has completed. Members that lack one of these adopt its result, and all other
    exchanges are repeated among the members of the view. Replicas wait meanwhile, and only notice the change of
    members.

    This object belongs to the replica's thread, its parts to the thread that carries exchanges.

    Args:
      runtime: Runtime of this member, whose view may lose members.
      key: Secret of the run that signs certificates.
      page: Memory for the reports that a supervisor reads after this process's end; ``None`` without a supervisor.
      min_members: Number of members below which the run ends.
      quorum: ``"majority"``; or ``"1"``: parts without a majority continue too, each with a model of its own.
      patience_s: Seconds without a sign of life after which an awaited member is evicted, and maximum time of an
        agreement.
      can_return: True if this member asks to be admitted again after the others have continued without it
        (:meth:`receive_state`). Its exchanges fail with :class:`farflung.errors.ReplicaSuspended` first.
      first_step: First step of the run.
      max_steps_ahead: Maximum number of steps that a member begins after the last one whose exchanges are all complete.
      members: Ranks of the first members; all by default. Any other rank asks to join.
      on_view: Callback that receives the members of each new view, by seniority.
    """

    def __init__(
        self,
        runtime: Runtime,
        key: bytes,
        *,
        page: Page | None = None,
        min_members: int = 1,
        quorum: str = "majority",
        patience_s: float = 60.0,
        can_return: bool = False,
        first_step: int = 0,
        max_steps_ahead: int = 1,
        members: Sequence[int] | None = None,
        on_view: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        ranks = tuple(range(runtime.comm.size) if members is None else members)
        names = tuple(map(str, ranks))
        view = View(int(runtime.comm.rank in ranks), names, (0,), (names,))
        self.roster = Roster(view, Change(first_step, ranks), max_steps_ahead)
        self.agreement = Agreement(
            runtime, key, self.roster, page=page, min_members=min_members, quorum=quorum, patience_s=patience_s,
            can_return=can_return, first_step=first_step, on_view=on_view,
        )  # fmt: skip
        self._runtime, self._log = runtime, self.agreement.log
        self.start = self._log.start
        """See :meth:`farflung.membership.exchanges.ExchangeLog.start`."""
        self.find_change = self.roster.find_change
        self.count_batches = self.roster.count_batches
        self.return_batches = self.roster.return_batches
        """See :class:`farflung.membership.roster.Roster`."""
        self.probe = self.agreement.liveness.probe
        """See :class:`farflung.membership.liveness.LivenessMonitor`."""

    # --- members ----------------------------------------------------------------------------------------------------

    @property
    def changes(self) -> list[Change]:
        """Changes of the members that take samples, by their first step."""
        return self.roster.changes

    @property
    def members(self) -> tuple[int, ...]:
        """Members of the newest view, by seniority."""
        return self.roster.members

    @property
    def view_number(self) -> int:
        """Number of the newest view."""
        return self.roster.view.number

    @property
    def interruption(self) -> Pending[None]:
        """See :class:`farflung.types.ElasticMembership`."""
        return self.agreement.interruption

    # --- joining ----------------------------------------------------------------------------------------------------

    @property
    def is_joining(self) -> bool:
        """Returns True if this member has not received the state of the run yet."""
        return self.agreement.is_joining

    @property
    def join_nbytes(self) -> int:
        """Bytes of the state and of results that this member received before it began."""
        return self.agreement.joiner.join_nbytes

    def should_publish_state(self, step: int) -> bool:
        """Starts a step, and informs the replicas that begin at it.

        Returns:
          True if a snapshot of the state must be offered before it; see :meth:`publish_state`.
        """
        self._log.step = step
        return self.agreement.giver.should_publish_state(step)

    async def publish_state(self, step: int, parts: Sequence[Tensor]) -> None:
        """Offers a snapshot of the state before a step to joining replicas.

        Args:
          step: Step that is about to begin.
          parts: Parts of the snapshot.
        """
        log = self._log
        await self._runtime.launch(
            self.agreement.giver.publish_state(step, parts, log.num_started, log.find_merged())
        )

    async def receive_state(self) -> list[Tensor]:
        """Waits for a snapshot of the state of the run, and returns its parts; call :meth:`should_follow` next.

        Raises:
          RunLost: The members that have the state are lost, or the run has ended.
        """
        return await self._runtime.launch(self.agreement.joiner.receive_state())

    async def should_follow(self, step: int) -> bool:
        """Waits until a step of the run can be followed by the results of its exchanges.

        Returns:
          False if this replica begins at it.

        Raises:
          StateOutdated: The followed state is outdated: begin again with :meth:`receive_state`.
          RunLost: As :meth:`receive_state`.
        """
        return await self._runtime.launch(self.agreement.joiner.should_follow(step))

    # --- the end ----------------------------------------------------------------------------------------------------

    def leave(self) -> Pending[None]:
        """Leaves the run: the others continue without this member, which hands over the results that it alone holds.

        Its exchanges then fail with :class:`farflung.errors.ReplicaLeft`. The others take over its batches that are in
        no update yet.

        Returns:
          Completes when it has left, or at the end of the run; fails if it has stopped for another reason.
        """
        leave_result, agreement = Pending[None](), self.agreement

        async def ask() -> None:
            agreement.leave_result = leave_result
            if agreement.is_over:
                leave_result.set_result(None)
            agreement.member.leave()
            agreement.schedule_processing()

        self._runtime.launch(ask())
        return leave_result

    def announce_failure(self) -> None:
        """Ends this member after an error of its process; called on the thread that carries exchanges."""
        if not self.agreement.is_over:
            self.agreement.member.end()

    async def finish(self, steps: int) -> None:
        """Waits until all members have every result of a number of steps; afterwards no member waits for another."""

        async def meet(channel: ExchangeChannel) -> tuple[Tensor, ...]:
            return await channel.get_collective("direct")(
                channel, torch.empty(0), torch.zeros(1, dtype=torch.float64)
            )

        agreement = self.agreement

        async def end() -> None:
            agreement.is_over = True
            if agreement.leave_result is not None:
                agreement.leave_result.set_result(None)
            for name in sorted(agreement.member.connected_names):
                self._runtime.comm.send(build_payload(RUN_COMPLETE), int(name), TAG, -1)

        if len(self.members) > 1:
            exchange = self.start(
                Purpose.LEAVING.build_exchange_id(steps), 0, meet, ResultCodec(tuple, tuple)
            )
            agreement.last_exchange = None if self.is_joining else exchange
            await exchange.result
        await self._runtime.launch(end())
