"""Fault environment in virtual time: replicas that crash, hang or slow down, links that are cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from typing_extensions import override

from farflung.comm.failure_detector import FailureDetector
from farflung.comm.mailbox import PROBES_PER_DEADLINE
from farflung.comm.transport import ConnectionTraffic
from farflung.errors import DeadlinePassed, PeerLost, ReplicaLeft, RunLost, Unsupported
from farflung.faults import FAULTS, MEMBERSHIP_KINDS, FaultEnvironment, FaultPlan, LinkCondition
from farflung.sim.clock import VirtualClock
from farflung.sim.membership import Membership
from farflung.sim.network import VirtualNetwork
from farflung.sim.pauses import Pauses
from farflung.tasks import Pending, Task
from farflung.types import Json

__all__ = ["SUPPORTED_FAULTS", "VirtualFaultEnvironment", "check_plan"]

SUPPORTED_FAULTS = frozenset(FAULTS).difference(MEMBERSHIP_KINDS)
"""Kinds of faults that virtual time supports in every view; elastic views also support those of membership."""


def check_plan(plan: FaultPlan, size: int, *, needs_all_members: bool = True) -> None:
    """Checks that virtual time supports a plan: joins and leaves only if exchanges do not need all members.

    Args:
      plan: Faults to inject.
      size: Number of replicas.
      needs_all_members: True if every exchange needs all replicas.

    Raises:
      Unsupported: A kind of fault is not supported.
      ConfigError: A rank does not exist.
    """
    for fault in plan.faults:
        if needs_all_members and fault.kind in MEMBERSHIP_KINDS:
            raise Unsupported(
                f"{fault}: virtual time supports only {', '.join(sorted(SUPPORTED_FAULTS))} where every "
                "exchange needs all replicas; members come and go with VirtualWorld(needs_all_members=False)"
            )
    plan.check(
        size, SUPPORTED_FAULTS.union(MEMBERSHIP_KINDS if not needs_all_members else ()), "virtual time"
    )


class VirtualFaultEnvironment(FaultEnvironment):
    """Fault environment in virtual time; detects lost ranks by closed connections and deadlines.

    Each peer detects a crash one link delay later; messages sent before it arrive. Admission and leaving are those of
    :class:`farflung.sim.membership.Membership`. Deadlines are checked only if the plan has faults.

    Args:
      clock: Virtual clock.
      network: Network of the world.
      plan: Faults to inject.
      deadline_s: Seconds that an awaited rank may be silent.
      needs_all_members: Ends the view with the first loss. If False, members continue without ended and lost ranks.
      absent_ranks: Ranks absent at the start, besides those whose first fault is to join.

    Raises:
      Unsupported: A fault is not supported.
      ConfigError: A fault names a rank that does not exist.
    """

    def __init__(
        self,
        clock: VirtualClock,
        network: VirtualNetwork,
        plan: FaultPlan,
        deadline_s: float,
        *,
        needs_all_members: bool = True,
        absent_ranks: Iterable[int] = (),
    ) -> None:
        size = len(network.mailboxes)
        super().__init__(size)
        check_plan(plan, size, needs_all_members=needs_all_members)
        self._clock, self._network, self._deadline_s = clock, network, deadline_s
        self._membership: Membership | None = None
        if not needs_all_members:
            self._membership = network.membership = Membership(
                network.mailboxes,
                plan.joining_ranks.union(absent_ranks),
                network.send_notice,
                network.report_closed,
            )
        self._start_task: Callable[[int], Pending[Any]]
        self.did_request_leave: Callable[[int], bool] = lambda rank: False
        """Requests a replica of an elastic run to leave; returns True if it is one."""
        self.crashed_ranks: set[int] = set()
        """Ranks that have crashed."""
        self._data_waiters: set[int] = set()
        self._detectors = [
            FailureDetector(rank, partial(self._measure_traffic, rank)) for rank in range(size)
        ]
        self._sent_nbytes: dict[tuple[int, int], int] = {}
        """Bytes that have left one rank for another, up to the last check or cut."""
        self.count_events: Callable[[int], int] = lambda rank: 0
        """Returns the number of computations of a replica."""
        self._pauses: Pauses | None = None
        if plan.faults:
            self._pauses = network.pauses = Pauses(clock)
        self._incarnations = [0] * size
        """Number of ended memberships of each rank; callbacks of an earlier one are dropped."""
        self.running_tasks: dict[int, Pending[Any]] = {}
        """Tasks of the ranks that have begun and not left."""
        self._is_check_scheduled = False
        self.rank_errors: dict[int, RunLost] = {}
        """Errors of ranks that ended in an elastic view, which the others continue."""
        self.error: BaseException | None = None
        """Error of the first replica that failed."""

    # --- faults -------------------------------------------------------------------------------------------------

    @override
    def read_clock(self) -> float:
        """Returns the virtual time; the first step begins at 0. See :class:`farflung.faults.FaultEnvironment`."""
        return self._clock.time()

    @override
    def call_at(self, time_s: float, fn: Callable[[], None]) -> None:
        self._clock.call_at(time_s, fn)

    @override
    def is_over(self) -> bool:
        remaining = [task for rank, task in self.running_tasks.items() if rank not in self.crashed_ranks]
        return bool(remaining) and all(task.is_done for task in remaining)

    @override
    def set_condition(self, src: int, dst: int, previous: LinkCondition, condition: LinkCondition) -> None:
        assert self._pauses is not None
        if condition.is_cut != previous.is_cut:
            (self._pauses.pause if condition.is_cut else self._pauses.resume)((src, dst))
        if (condition.bandwidth_bps, condition.loss) != (previous.bandwidth_bps, previous.loss):
            self._network.limit(src, dst, bandwidth_bps=condition.bandwidth_bps, loss=condition.loss)

    @override
    def set_hung(self, rank: int, is_hung: bool) -> None:
        assert self._pauses is not None
        (self._pauses.pause if is_hung else self._pauses.resume)(rank)

    @override
    def crash(self, rank: int) -> None:
        if self._membership is not None:
            if rank in self._membership:
                self._membership.remove_crashed(rank)
        else:
            error = PeerLost(rank, "its connection was closed from its end")
            for peer, mailbox in enumerate(self._network.mailboxes):
                if peer != rank:
                    self._network.report_closed(rank, peer, partial(mailbox.end, error))
        if rank in self.running_tasks:
            self.crashed_ranks.add(rank)

    @override
    def reset(self, rank: int, peer: int) -> None:
        if self._membership is not None:
            self._membership.reset_connection(rank, peer)
        else:
            self._network.mailboxes[rank].end(PeerLost(peer, "its connection was closed from its end"))

    @override
    def leave(self, rank: int) -> None:
        self.call_when_running(rank, self.get_running_s(rank), lambda: self._begin_leave(rank))

    def _begin_leave(self, rank: int) -> None:
        """Begins the leave of a rank for the fault plan, unless it has requested one itself, and drops its task."""
        assert self._membership is not None
        if not self.did_request_leave(rank) and rank in self._membership:
            del self.running_tasks[rank]
            self._incarnations[rank] += 1
            self._membership.begin_leave(rank)

    @override
    def join(self, rank: int) -> None:
        assert self._membership is not None
        if rank in self._membership:
            return
        self._incarnations[rank] += rank in self.running_tasks  # it crashed or ended
        self.crashed_ranks.discard(rank)
        self._start(rank)
        self._membership.admit(rank)
        if not self._is_check_scheduled:
            self._check_deadlines()

    # --- effects on replicas ------------------------------------------------------------------------------------

    def get_slowdown(self, rank: int) -> float:
        """Returns the factor by which a replica computes slower."""
        return self.active_faults.get_slowdown(rank)

    def get_running_s(self, rank: int) -> float:
        """Returns the virtual seconds that a replica has been running since the beginning."""
        return self._clock.time() - (0.0 if self._pauses is None else self._pauses.get_paused_s(rank))

    def call_when_running(self, rank: int, due_s: float, fn: Callable[[], None]) -> None:
        """Calls ``fn`` when :meth:`get_running_s` of a replica is ``due_s``; never if it crashes or leaves
        before.
        """
        if self._pauses is None:
            self._clock.call_at(due_s, fn)
            return
        pauses, incarnation = self._pauses, self._incarnations[rank]
        self._clock.call_at(
            due_s + pauses.get_paused_s(rank),
            lambda: pauses.call_at(rank, due_s, lambda _: self._call_in_incarnation(rank, incarnation, fn)),
        )

    def mark_data_wait(self, rank: int, arrival: Pending[None]) -> None:
        """Marks a rank as waiting for samples until ``arrival`` is complete."""
        if self._pauses is not None:
            self._data_waiters.add(rank)
            arrival.add_done_callback(lambda _: self._data_waiters.discard(rank))

    def _is_silent(self, rank: int) -> bool:
        return rank in self.crashed_ranks or (self._pauses is not None and self._pauses.is_paused(rank))

    def find_hung(self) -> set[int]:
        """Returns the ranks that a fault suspends before their end."""
        return {
            rank
            for rank, task in self.running_tasks.items()
            if not task.is_done and rank not in self.crashed_ranks and self.active_faults.is_hung(rank)
        }

    def build_call_soon(self, rank: int) -> Callable[[Callable[[], None]], None]:
        """Builds the function that queues coroutine steps of a replica: at once, when it resumes, or never."""
        if self._pauses is None:
            return self._clock.call_soon
        pauses, incarnation = self._pauses, self._incarnations[rank]

        def call_soon(fn: Callable[[], None]) -> None:
            due_s = self._clock.time() - pauses.get_paused_s(rank)
            self._clock.call_soon(
                lambda: pauses.call_at(
                    rank, due_s, lambda _: self._call_in_incarnation(rank, incarnation, fn)
                )
            )

        return call_soon

    def _call_in_incarnation(self, rank: int, incarnation: int, fn: Callable[[], None]) -> None:
        if self._incarnations[rank] == incarnation and rank not in self.crashed_ranks:
            fn()
        elif isinstance(task := getattr(fn, "__self__", None), Task):
            task.close()

    # --- end of tasks -------------------------------------------------------------------------------------------

    def start_replicas(self, start_task: Callable[[int], Pending[Any]]) -> None:
        """Starts the members; an error ends the run of all, except the loss of one replica in an elastic run.

        Args:
          start_task: Starts a replica, for the first time or again.
        """
        self._start_task = start_task
        for rank in range(self.size):
            if self._membership is None or rank in self._membership:
                self._start(rank)
        if self._pauses is not None:
            self._check_deadlines()

    def _start(self, rank: int) -> None:
        task = self.running_tasks[rank] = self._start_task(rank)
        task.add_done_callback(partial(self._handle_task_end, rank))

    def _handle_task_end(self, rank: int, task: Pending[Any]) -> None:
        """Begins the leave of a replica that has ended; crashes a lost one; another error ends the run."""
        if task.error is None:
            if self._membership is not None:
                self._membership.begin_leave(rank)
            return
        if self._membership is not None and isinstance(task.error, RunLost):
            self.rank_errors[rank] = task.error
            if isinstance(task.error, ReplicaLeft) and rank in self._membership:
                self._membership.begin_leave(rank)
                self.crashed_ranks.add(rank)
            else:
                self.crash(rank)
            return
        if self.error is None:
            self.error = task.error
            if self._pauses is not None:
                for mailbox in self._network.mailboxes:
                    mailbox.end(task.error)

    def _check_deadlines(self) -> None:
        """Fails the first wait that its failure detector gives up; otherwise schedules the next check."""
        self._is_check_scheduled = False
        alive = [rank for rank, task in self.running_tasks.items() if not task.is_done]
        if self.error is not None or not alive:
            return
        time_s, next_check_s = self._clock.time(), math.inf
        if self.crashed_ranks.issuperset(alive):
            if self._membership is not None and self._clock.get_next_time() < math.inf:
                self._schedule_check(time_s + self._deadline_s)  # others may be admitted
            elif self._membership is None or len(self.crashed_ranks) == len(self.running_tasks):
                error = PeerLost(alive[0], "its connection was closed from its end")
                self.error = next(iter(self.rank_errors.values()), error)
            return
        for rank in alive:
            wait, detector = self._network.mailboxes[rank].waits.get_oldest(), self._detectors[rank]
            if self._is_silent(rank):
                continue
            if wait is None:
                detector.stop_probing()
                continue
            peers = [peer for peer in range(self.size) if peer != rank]
            for peer in peers:
                detector.record_message(peer, self._network.last_arrival_s.get((peer, rank), -math.inf))
            check = detector.check(wait, peers, time_s, self._deadline_s)
            if check.failure is not None:
                failed_rank, reason = check.failure
                deadline_error = DeadlinePassed(
                    failed_rank, wait.description, time_s - wait.start_s, reason=reason
                )
                if self._membership is not None:
                    self._network.mailboxes[rank].waits.fail(wait, deadline_error)
                    self._is_check_scheduled = True
                    self._clock.call_soon(self._check_deadlines)
                else:
                    self._network.mailboxes[rank].end(deadline_error)
                return
            if check.should_probe:
                self._collect_reports(rank, peers)
            next_check_s = min(next_check_s, check.next_check_s)
        if self._clock.get_next_time() < math.inf:
            next_check_s = min(next_check_s, time_s + self._deadline_s / PROBES_PER_DEADLINE)
        if next_check_s < math.inf:
            self._schedule_check(next_check_s)

    def _schedule_check(self, t: float) -> None:
        self._is_check_scheduled = True
        self._clock.call_at(t, self._check_deadlines)

    # --- failure detection ----------------------------------------------------------------------------------------

    def _collect_reports(self, rank: int, peers: Iterable[int]) -> None:
        """Collects reports from the peers that a question of a rank reaches, and whose answer reaches it."""
        time_s = self._clock.time()
        for peer in peers:
            if self._is_silent(peer) or self._is_cut(rank, peer) or self._is_cut(peer, rank):
                continue
            if self._membership is not None and not self._membership.can_send(rank, peer):
                continue
            wait = self._network.mailboxes[peer].waits.get_any()
            blocked_on = None if wait is None else wait.src
            peers_of_peer = [target for target in range(self.size) if target != peer]
            body: dict[str, Json] = {
                "for": "data" if peer in self._data_waiters else blocked_on,
                "count": self.count_events(peer) + self._network.message_counts[peer],
                "nbytes": sum(self._measure_traffic(peer, target).bulk_nbytes for target in peers_of_peer),
            }
            self._detectors[rank].record_report(peer, body, time_s, self._deadline_s)
            self._detectors[rank].record_message(peer, time_s)

    def _measure_traffic(self, rank: int, peer: int) -> ConnectionTraffic:
        """Returns the traffic between two ranks; it does not grow while their links are cut."""
        for link in ((rank, peer), (peer, rank)):
            if not self._is_cut(*link):
                self._sent_nbytes[link] = self._network.get_sent_nbytes(*link)
        received, sent = (self._sent_nbytes.get(link, 0) for link in ((peer, rank), (rank, peer)))
        return ConnectionTraffic(received, received + sent)

    def _is_cut(self, src: int, dst: int) -> bool:
        return self._pauses is not None and self._pauses.is_paused((src, dst))
