"""Virtual time as a stage for faults: replicas that crash, hang or slow down, links that are cut."""

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
"""The kinds of faults that virtual time carries in every view; in one that is not whole members may come and go too."""


def check_plan(plan: FaultPlan, size: int, *, whole: bool = True) -> None:
    """Whether virtual time can carry a plan.

    Args:
      plan: what goes wrong.
      size: number of replicas.
      whole: whether every exchange needs all of them.

    Raises:
      Unsupported: a kind of fault that it does not carry.
      ConfigError: a rank that there is not.
    """
    for fault in plan.faults:
        if whole and fault.kind in MEMBERSHIP:
            raise Unsupported(
                f"{fault}: virtual time carries {', '.join(sorted(CARRIED))} alone where every exchange needs all "
                "replicas; members come and go in a view that is not whole (VirtualWorld(whole=False))"
            )
    plan.check(size, CARRIED.union(MEMBERSHIP if not whole else ()), "virtual time")


class VirtualStage(Stage):
    """Applies faults in virtual time; detects lost ranks as the wall clock does, by closed connections and deadlines.

    Each peer detects a crash one link delay later; messages sent before it arrive. Admission and leaving are those of
    :class:`farflung.sim.membership.Membership`. Deadlines are checked only where the plan has faults.

    Args:
      clock: virtual time.
      network: of the world.
      plan: what will go wrong.
      deadline_s: how long a rank that is waited for may be silent.
      whole: whether the first loss ends the view; otherwise the members go on without ranks that end, leave or crash.
      absent: ranks that are not there at the start, beside those whose first fault is to join.

    Raises:
      Unsupported: a fault that is not carried.
      ConfigError: a fault of a rank that there is not.
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
        """Has a replica of an elastic run leave it; whether it is one."""
        self.crashed: set[int] = set()
        """The ranks that have crashed."""
        self._waiting_for_data: set[int] = set()
        self._detectors = [FailureDetector(rank, partial(self._traffic, rank)) for rank in range(size)]
        self._carried_nbytes: dict[tuple[int, int], int] = {}
        """Bytes that have left one rank for another up to the last look or cut."""
        self.events: Callable[[int], int] = lambda rank: 0
        """Counts the computations of a replica."""
        self._pauses: Pauses | None = None
        if plan.faults:
            self._pauses = network.pauses = Pauses(clock)
        self._stays = [0] * size
        """The number of ended memberships of each rank; callbacks of an earlier one are dropped."""
        self.running: dict[int, Pending[Any]] = {}
        """The tasks of the ranks that have begun and not left."""
        self._watching = False
        self.errors: dict[int, RunLost] = {}
        """The errors of ranks that ended in a view that is not whole, and went on for others."""
        self.error: BaseException | None = None
        """The error of the first replica that failed."""

    # --- what goes wrong ----------------------------------------------------------------------------------------

    @override
    def now(self) -> float:
        """See :class:`farflung.faults.Stage`; the first step begins when virtual time does."""
        return self._clock.now()

    @override
    def at(self, t: float, fn: Callable[[], None]) -> None:
        self._clock.at(t, fn)

    @override
    def is_over(self) -> bool:
        left = [task for rank, task in self.running.items() if rank not in self.crashed]
        return bool(left) and all(task.done for task in left)

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
            lost = PeerLost(rank, "its connection was closed from its end")
            for peer, mailbox in enumerate(self._network.mailboxes):
                if peer != rank:
                    self._network.notice(rank, peer, partial(mailbox.end, lost))
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

    # --- what the replicas feel ---------------------------------------------------------------------------------

    def slowed(self, rank: int) -> float:
        """How many times as long a replica computes."""
        return self.standing.slowdown(rank)

    def running_s(self, rank: int) -> float:
        """For how long a replica has been running, in virtual seconds since the beginning."""
        return self._clock.now() - (0.0 if self._pauses is None else self._pauses.lost_s(rank))

    def when_running(self, rank: int, due_s: float, fn: Callable[[], None]) -> None:
        """Calls ``fn`` when :meth:`running_s` of a replica is ``due_s``; never if it crashes or leaves before."""
        if self._pauses is None:
            self._clock.at(due_s, fn)
            return
        pauses, stay = self._pauses, self._stays[rank]
        self._clock.at(
            due_s + pauses.lost_s(rank),
            lambda: pauses.wait(rank, due_s, lambda _: self._in_stay(rank, stay, fn)),
        )

    def waits_for_data(self, rank: int, arrived: Pending[None]) -> None:
        """Marks a rank as waiting for samples until ``arrived``."""
        if self._pauses is not None:
            self._waiting_for_data.add(rank)
            arrived.on_done(lambda _: self._waiting_for_data.discard(rank))

    def _silent(self, rank: int) -> bool:
        return rank in self.crashed or (self._pauses is not None and self._pauses.stopped(rank))

    def find_hung(self) -> set[int]:
        """Returns the ranks that stand still in the midst of their work."""
        return {
            rank
            for rank, task in self.running.items()
            if not task.done and rank not in self.crashed and self.standing.hangs(rank)
        }

    def soon_of(self, rank: int) -> Callable[[Callable[[], None]], None]:
        """What queues the steps of a replica's coroutines: at once, when it goes on, or never."""
        if self._pauses is None:
            return self._clock.soon
        pauses, stay = self._pauses, self._stays[rank]

        def soon(fn: Callable[[], None]) -> None:
            due = self._clock.now() - pauses.lost_s(rank)
            self._clock.soon(lambda: pauses.wait(rank, due, lambda _: self._in_stay(rank, stay, fn)))

        return soon

    def _in_stay(self, rank: int, stay: int, fn: Callable[[], None]) -> None:
        if self._stays[rank] == stay and rank not in self.crashed:
            fn()
        elif isinstance(task := getattr(fn, "__self__", None), Task):
            task.drop()

    # --- how it ends --------------------------------------------------------------------------------------------

    def watch(self, begin: Callable[[int], Pending[Any]]) -> None:
        """Begins and follows the replicas: the first error ends the view for all.

        Args:
          begin: has a replica begin, for the first time or again.
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
        """Ends the view when the oldest wait is too old; looks again when it may be."""
        self._watching = False
        alive = [rank for rank, task in self.running.items() if not task.done]
        if self.error is not None or not alive:
            return
        now, again = self._clock.now(), math.inf
        if self.crashed.issuperset(alive):
            if self._members is not None and self._clock.due() < math.inf:
                self._look_at(now + self._deadline_s)  # others may come in
            elif self._members is None or len(self.crashed) == len(self.running):
                closed = PeerLost(alive[0], "its connection was closed from its end")
                self.error = next(iter(self.errors.values()), closed)
            return
        for rank in alive:
            waiting, detector = self._network.mailboxes[rank].oldest(), self._detectors[rank]
            if self._silent(rank):
                continue
            if waiting is None:
                detector.rest()
                continue
            peers = [peer for peer in range(self.size) if peer != rank]
            for peer in peers:
                detector.hear(peer, self._network.heard_s.get((peer, rank), -math.inf))
            check = detector.check(waiting, peers, now, self._deadline_s)
            if check.failure is not None:
                failed, why = check.failure
                passed = DeadlinePassed(failed, waiting.what, now - waiting.since, why=why)
                if self._members is not None:
                    self._network.mailboxes[rank].fail(waiting, passed)
                    self._watching = True
                    self._clock.soon(self._look)
                else:
                    self._network.mailboxes[rank].end(passed)
                return
            if check.asks:
                self._answer(rank, peers)
            again = min(again, check.due_s)
        if self._clock.due() < math.inf:
            again = min(again, now + self._deadline_s / QUESTIONS)
        if again < math.inf:
            self._look_at(again)

    def _look_at(self, t: float) -> None:
        self._watching = True
        self._clock.at(t, self._look)

    # --- signs of life ------------------------------------------------------------------------------------------

    def _answer(self, rank: int, peers: Iterable[int]) -> None:
        """Has those that a question of a rank reaches, and that reach the rank, answer at once."""
        now = self._clock.now()
        for peer in peers:
            if self._silent(peer) or self._is_cut(rank, peer) or self._is_cut(peer, rank):
                continue
            if self._members is not None and not self._members.reaches(rank, peer):
                continue
            waiting = self._network.mailboxes[peer].any_wait()
            blocked_on = None if waiting is None else waiting.src
            others = [other for other in range(self.size) if other != peer]
            body: dict[str, Json] = {
                "for": "data" if peer in self._waiting_for_data else blocked_on,
                "count": self.events(peer) + self._network.message_counts[peer],
                "nbytes": sum(self._traffic(peer, other).moved_nbytes for other in others),
            }
            self._detectors[rank].hear_report(peer, body, now, self._deadline_s)
            self._detectors[rank].hear(peer, now)

    def _traffic(self, rank: int, peer: int) -> Traffic:
        """Returns what the links between two ranks have carried; nothing more while they are cut."""
        for way in ((rank, peer), (peer, rank)):
            if not self._is_cut(*way):
                self._carried_nbytes[way] = self._network.carried_nbytes(*way)
        heard, sent = (self._carried_nbytes.get(way, 0) for way in ((peer, rank), (rank, peer)))
        return Traffic(heard, heard + sent)

    def _is_cut(self, src: int, dst: int) -> bool:
        return self._pauses is not None and self._pauses.stopped((src, dst))
