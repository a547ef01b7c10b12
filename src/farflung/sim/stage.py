"""Fault environment in virtual time: replicas that crash, hang or slow down, links that are cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from typing_extensions import override

from farflung.comm.failure_detector import FailureDetector
from farflung.comm.mailbox import QUESTIONS
from farflung.comm.transport import Traffic
from farflung.errors import DeadlinePassed, Left, PeerLost, RunLost, Unsupported
from farflung.faults import FAULTS, MEMBERSHIP, Condition, FaultPlan, Stage
from farflung.sim.clock import VirtualClock
from farflung.sim.membership import Membership
from farflung.sim.network import VirtualNetwork
from farflung.sim.pauses import Pauses
from farflung.tasks import Pending, Task
from farflung.types import Json

__all__ = ["CARRIED", "VirtualStage", "check_plan"]

CARRIED = frozenset(FAULTS).difference(MEMBERSHIP)
"""Kinds of faults that virtual time supports in every view; elastic views also support those of membership."""


def check_plan(plan: FaultPlan, size: int, *, whole: bool = True) -> None:
    """Checks that virtual time supports a plan.

    Args:
      plan: Faults to inject.
      size: Number of replicas.
      needs_all_members: True if every exchange needs all replicas.

    Raises:
      Unsupported: A kind of fault is not supported.
      ConfigError: A rank does not exist.
    """
    for fault in plan.faults:
        if whole and fault.kind in MEMBERSHIP:
            raise Unsupported(
                f"{fault}: virtual time carries {', '.join(sorted(CARRIED))} alone where every exchange needs all "
                "replicas; members come and go in a view that is not whole (VirtualWorld(whole=False))"
            )
    plan.check(size, CARRIED.union(MEMBERSHIP if not whole else ()), "virtual time")


class VirtualStage(Stage):
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
        whole: bool = True,
        absent: Iterable[int] = (),
    ) -> None:
        size = len(network.mailboxes)
        super().__init__(size)
        check_plan(plan, size, whole=whole)
        self._clock, self._network, self._deadline_s = clock, network, deadline_s
        self._members: Membership | None = None
        if not whole:
            self._members = network.membership = Membership(
                network.mailboxes, plan.absent.union(absent), network.signal, network.notice
            )
        self._begin: Callable[[int], Pending[Any]]
        self.leaves: Callable[[int], bool] = lambda rank: False
        """Requests a replica of an elastic run to leave; returns True if it is one."""
        self.crashed: set[int] = set()
        """Ranks that have crashed."""
        self._waiting_for_data: set[int] = set()
        self._detectors = [FailureDetector(rank, partial(self._traffic, rank)) for rank in range(size)]
        self._carried_nbytes: dict[tuple[int, int], int] = {}
        """Bytes that have left one rank for another, up to the last check or cut."""
        self.events: Callable[[int], int] = lambda rank: 0
        """Returns the number of computations of a replica."""
        self._pauses: Pauses | None = None
        if plan.faults:
            self._pauses = network.pauses = Pauses(clock)
        self._stays = [0] * size
        """Number of ended memberships of each rank; callbacks of an earlier one are dropped."""
        self.running: dict[int, Pending[Any]] = {}
        """Tasks of the ranks that have begun and not left."""
        self._watching = False
        self.errors: dict[int, RunLost] = {}
        """Errors of ranks that ended in an elastic view, which the others continue."""
        self.error: BaseException | None = None
        """Error of the first replica that failed."""

    # --- faults -------------------------------------------------------------------------------------------------

    @override
    def now(self) -> float:
        """Returns the virtual time; the first step begins at 0. See :class:`farflung.faults.FaultEnvironment`."""
        return self._clock.now()

    @override
    def at(self, t: float, fn: Callable[[], None]) -> None:
        self._clock.at(t, fn)

    @override
    def is_over(self) -> bool:
        remaining = [task for rank, task in self.running.items() if rank not in self.crashed]
        return bool(remaining) and all(task.done for task in remaining)

    @override
    def change(self, src: int, dst: int, before: Condition, now: Condition) -> None:
        assert self._pauses is not None
        if now.cut != before.cut:
            (self._pauses.stop if now.cut else self._pauses.go_on)((src, dst))
        if (now.bandwidth_bps, now.loss) != (before.bandwidth_bps, before.loss):
            self._network.limit(src, dst, bandwidth_bps=now.bandwidth_bps, loss=now.loss)

    @override
    def hang(self, rank: int, hangs: bool) -> None:
        assert self._pauses is not None
        (self._pauses.stop if hangs else self._pauses.go_on)(rank)

    @override
    def crash(self, rank: int) -> None:
        if self._members is not None:
            if rank in self._members:
                self._members.crashes(rank)
        else:
            error = PeerLost(rank, "its connection was closed from its end")
            for peer, mailbox in enumerate(self._network.mailboxes):
                if peer != rank:
                    self._network.notice(rank, peer, partial(mailbox.end, error))
        if rank in self.running:
            self.crashed.add(rank)

    @override
    def reset(self, rank: int, peer: int) -> None:
        if self._members is not None:
            self._members.reset(rank, peer)
        else:
            self._network.mailboxes[rank].end(PeerLost(peer, "its connection was closed from its end"))

    @override
    def leave(self, rank: int) -> None:
        self.when_running(rank, self.running_s(rank), lambda: self._leave(rank))

    def _leave(self, rank: int) -> None:
        assert self._members is not None
        if not self.leaves(rank) and rank in self._members:
            del self.running[rank]
            self._stays[rank] += 1
            self._members.leaves(rank)

    @override
    def join(self, rank: int) -> None:
        assert self._members is not None
        if rank in self._members:
            return
        self._stays[rank] += rank in self.running  # it crashed or ended
        self.crashed.discard(rank)
        self._start(rank)
        self._members.comes(rank)
        if not self._watching:
            self._look()

    # --- effects on replicas ------------------------------------------------------------------------------------

    def slowed(self, rank: int) -> float:
        """Returns the factor by which a replica computes slower."""
        return self.standing.slowdown(rank)

    def running_s(self, rank: int) -> float:
        """Returns the virtual seconds that a replica has been running since the beginning."""
        return self._clock.now() - (0.0 if self._pauses is None else self._pauses.lost_s(rank))

    def when_running(self, rank: int, due_s: float, fn: Callable[[], None]) -> None:
        """Calls ``fn`` when :meth:`get_running_s` of a replica is ``due_s``; never if it crashes or leaves before."""
        if self._pauses is None:
            self._clock.at(due_s, fn)
            return
        pauses, incarnation = self._pauses, self._stays[rank]
        self._clock.at(
            due_s + pauses.lost_s(rank),
            lambda: pauses.wait(rank, due_s, lambda _: self._in_stay(rank, incarnation, fn)),
        )

    def waits_for_data(self, rank: int, arrived: Pending[None]) -> None:
        """Marks a rank as waiting for samples until ``arrival``."""
        if self._pauses is not None:
            self._waiting_for_data.add(rank)
            arrived.on_done(lambda _: self._waiting_for_data.discard(rank))

    def _silent(self, rank: int) -> bool:
        return rank in self.crashed or (self._pauses is not None and self._pauses.stopped(rank))

    def find_hung(self) -> set[int]:
        """Returns the ranks that a fault suspends before their end."""
        return {
            rank
            for rank, task in self.running.items()
            if not task.done and rank not in self.crashed and self.standing.hangs(rank)
        }

    def soon_of(self, rank: int) -> Callable[[Callable[[], None]], None]:
        """Builds the function that queues coroutine steps of a replica: at once, when it resumes, or never."""
        if self._pauses is None:
            return self._clock.soon
        pauses, incarnation = self._pauses, self._stays[rank]

        def call_soon(fn: Callable[[], None]) -> None:
            due_s = self._clock.now() - pauses.lost_s(rank)
            self._clock.soon(lambda: pauses.wait(rank, due_s, lambda _: self._in_stay(rank, incarnation, fn)))

        return call_soon

    def _in_stay(self, rank: int, stay: int, fn: Callable[[], None]) -> None:
        if self._stays[rank] == stay and rank not in self.crashed:
            fn()
        elif isinstance(task := getattr(fn, "__self__", None), Task):
            task.drop()

    # --- end of tasks -------------------------------------------------------------------------------------------

    def watch(self, begin: Callable[[int], Pending[Any]]) -> None:
        """Starts the replicas; the first error ends the view for all.

        Args:
          start_task: Starts a replica, for the first time or again.
        """
        self._begin = begin
        for rank in range(self.size):
            if self._members is None or rank in self._members:
                self._start(rank)
        if self._pauses is not None:
            self._look()

    def _start(self, rank: int) -> None:
        task = self.running[rank] = self._begin(rank)
        task.on_done(partial(self._one_ended, rank))

    def _one_ended(self, rank: int, task: Pending[Any]) -> None:
        if task.error is None:
            if self._members is not None:
                self._members.leaves(rank)
            return
        if self._members is not None and isinstance(task.error, RunLost):
            self.errors[rank] = task.error
            if isinstance(task.error, Left) and rank in self._members:
                self._members.leaves(rank)
                self.crashed.add(rank)
            else:
                self.crash(rank)
            return
        if self.error is None:
            self.error = task.error
            if self._pauses is not None:
                for mailbox in self._network.mailboxes:
                    mailbox.end(task.error)

    def _look(self) -> None:
        """Ends the view if the oldest wait has passed its deadline; otherwise schedules the next check."""
        self._watching = False
        alive = [rank for rank, task in self.running.items() if not task.done]
        if self.error is not None or not alive:
            return
        time_s, next_check_s = self._clock.now(), math.inf
        if self.crashed.issuperset(alive):
            if self._members is not None and self._clock.due() < math.inf:
                self._look_at(time_s + self._deadline_s)  # others may be admitted
            elif self._members is None or len(self.crashed) == len(self.running):
                error = PeerLost(alive[0], "its connection was closed from its end")
                self.error = next(iter(self.errors.values()), error)
            return
        for rank in alive:
            wait, detector = self._network.mailboxes[rank].oldest(), self._detectors[rank]
            if self._silent(rank):
                continue
            if wait is None:
                detector.rest()
                continue
            peers = [peer for peer in range(self.size) if peer != rank]
            for peer in peers:
                detector.hear(peer, self._network.heard_s.get((peer, rank), -math.inf))
            check = detector.check(wait, peers, time_s, self._deadline_s)
            if check.failure is not None:
                failed_rank, reason = check.failure
                deadline_error = DeadlinePassed(failed_rank, wait.what, time_s - wait.since, why=reason)
                if self._members is not None:
                    self._network.mailboxes[rank].fail(wait, deadline_error)
                    self._watching = True
                    self._clock.soon(self._look)
                else:
                    self._network.mailboxes[rank].end(deadline_error)
                return
            if check.asks:
                self._answer(rank, peers)
            next_check_s = min(next_check_s, check.due_s)
        if self._clock.due() < math.inf:
            next_check_s = min(next_check_s, time_s + self._deadline_s / QUESTIONS)
        if next_check_s < math.inf:
            self._look_at(next_check_s)

    def _look_at(self, t: float) -> None:
        self._watching = True
        self._clock.at(t, self._look)

    # --- failure detection ----------------------------------------------------------------------------------------

    def _answer(self, rank: int, peers: Iterable[int]) -> None:
        """Collects reports from the peers that a question of a rank reaches, and whose answer reaches it."""
        time_s = self._clock.now()
        for peer in peers:
            if self._silent(peer) or self._is_cut(rank, peer) or self._is_cut(peer, rank):
                continue
            if self._members is not None and not self._members.reaches(rank, peer):
                continue
            wait = self._network.mailboxes[peer].any_wait()
            blocked_on = None if wait is None else wait.src
            peers_of_peer = [target for target in range(self.size) if target != peer]
            body: dict[str, Json] = {
                "for": "data" if peer in self._waiting_for_data else blocked_on,
                "count": self.events(peer) + self._network.message_counts[peer],
                "nbytes": sum(self._traffic(peer, target).moved_nbytes for target in peers_of_peer),
            }
            self._detectors[rank].hear_report(peer, body, time_s, self._deadline_s)
            self._detectors[rank].hear(peer, time_s)

    def _traffic(self, rank: int, peer: int) -> Traffic:
        """Returns the traffic between two ranks; it does not grow while their links are cut."""
        for link in ((rank, peer), (peer, rank)):
            if not self._is_cut(*link):
                self._carried_nbytes[link] = self._network.carried_nbytes(*link)
        received, sent = (self._carried_nbytes.get(link, 0) for link in ((peer, rank), (rank, peer)))
        return Traffic(received, received + sent)

    def _is_cut(self, src: int, dst: int) -> bool:
        return self._pauses is not None and self._pauses.stopped((src, dst))
