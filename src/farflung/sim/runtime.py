"""Virtual time: one heap of ``(time, priority, sequence)`` drives all replicas in one thread, deterministically."""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

from farflung import tasks
from farflung.comm import AUTO, Mailbox, collective_named
from farflung.decisions import COLLECTIVE, DecisionLog, adopt_collectives, collectives_of, decide_by_rank_0
from farflung.devices import DeviceProfile, Moment
from farflung.errors import ConfigError, RunLost
from farflung.faults import FaultInjector, FaultPlan
from farflung.network import Link, NetworkProfile
from farflung.seeding import RandomState
from farflung.sim.clock import VirtualClock
from farflung.sim.lane import Lane
from farflung.sim.network import UntimedSums, VirtualNetwork
from farflung.sim.stage import VirtualStage
from farflung.tasks import Pending, Task
from farflung.types import Communicator, Cost, Decision, Elastic, Json

__all__ = ["VirtualRuntime", "VirtualWorld"]

T = TypeVar("T")

DEADLINE_S = 60.0
SELDOM = 100
"""How many times as seldom as elsewhere all objects are searched for cyclic garbage."""


class VirtualWorld:
    """``size`` replicas on one clock.

    Args:
      size: number of replicas.
      network: a profile, or the link of each ordered pair; without one, messages take no time.
      seconds_per_sample: what a forward pass costs per sample; a backward pass costs twice that.
      device: a profile in the place of ``seconds_per_sample``, or one for each replica.
      seed: of jitter and stragglers.
      faults: what goes wrong; replicas tell :attr:`injector` of their steps.
      deadline_s: how long a replica that is waited for may be silent where something goes wrong, in virtual seconds.
      decisions: where decisions are kept; a fresh log when not given.
      count_evaluation: whether evaluations and checkpoints take time; see :attr:`VirtualRuntime.off_clock`.
      whole: whether the view ends with the first replica that is lost, as it has to where every exchange needs all of
        them; otherwise its messages alone fail, and so do those of a replica whose coroutine has ended. Then faults may
        have replicas leave, and join: one to which that happens first is not there at the start.

      absent: ranks that are not there at the start, beside those whose first fault is to join.

    Raises:
      ConfigError: profiles or faults for another number of replicas.
      Unsupported: faults that virtual time cannot carry.
    """

    def __init__(
        self,
        size: int,
        network: NetworkProfile | Link | None = None,
        seconds_per_sample: float = 0.0,
        *,
        device: DeviceProfile | Sequence[DeviceProfile] | None = None,
        seed: int = 0,
        faults: FaultPlan | None = None,
        deadline_s: float = DEADLINE_S,
        decisions: DecisionLog | None = None,
        count_evaluation: bool = False,
        whole: bool = True,
        absent: Iterable[int] = (),
    ) -> None:
        faults = faults or FaultPlan()
        self.clock = VirtualClock()
        self.encrypted = network is not None
        """Whether messages are, as those of real runs are that leave a machine."""
        self.network = VirtualNetwork(
            self.clock, size, network or Link(), seed=seed, encrypted=self.encrypted
        )
        self.off_clock: VirtualNetwork | None = None
        """Carries messages that take no virtual time; losses and deadlines apply to it as to the network."""
        if not count_evaluation:
            self.off_clock = VirtualNetwork(self.clock, size, Link(), mailboxes=self.network.mailboxes)
            if whole and not faults.faults:
                self.off_clock.untimed_sums = UntimedSums()
        self.seed = seed
        self.decisions = decisions or DecisionLog()
        self.stage = VirtualStage(self.clock, self.network, faults, deadline_s, whole=whole, absent=absent)
        if self.off_clock is not None:
            self.off_clock.membership = self.network.membership
        self.injector = FaultInjector(faults, self.stage)
        """A sink for the events of all replicas."""
        self.runtimes = [
            VirtualRuntime(self, rank, one)
            for rank, one in enumerate(_devices(size, device, seconds_per_sample))
        ]
        self.stage.leaves = self._leaves
        self.stage.events = lambda rank: self.runtimes[rank].events
        self.network.charge([runtime.lane for runtime in self.runtimes])

    def _leaves(self, rank: int) -> bool:
        elastic = self.runtimes[rank].elastic
        if elastic is not None:
            elastic.leave()
        return elastic is not None

    def run(
        self,
        coroutines: Sequence[Coroutine[Pending[Any], None, T]],
        *,
        again: Callable[[VirtualRuntime], Coroutine[Pending[Any], None, T]] | None = None,
    ) -> list[T]:
        """Drives one coroutine for each replica to its end.

        Args:
          coroutines: by rank; that of a rank that is absent at the start begins when the rank is admitted.
          again: makes the coroutine of a rank that is admitted again, from a new runtime; its result counts.

        Returns:
          The results in rank order, without ranks that crashed, left by a fault, hang for ever, or were never admitted.

        Raises:
          ConfigError: a rank is admitted again, and ``again`` is not given.
          RunLost: a rank was lost; or all ranks that do not hang wait and no message is on its way; names what each
            rank waits for.
          BaseException: the error of the first replica that failed.
        """
        first = dict(enumerate(coroutines))

        def begin(rank: int) -> Task[T]:
            if rank in first:
                return Task(first.pop(rank), self.runtimes[rank].soon)
            if again is None:
                raise ConfigError(
                    f"rank {rank} comes in again: say what it runs by run(coroutines, again=...)"
                )
            runtime = self._renewed(rank)
            return Task(again(runtime), runtime.soon)

        if len(first) != len(self.runtimes):
            raise ConfigError(f"{len(first)} coroutines for {len(self.runtimes)} replicas")
        try:
            with RandomState.scope(), _settled_memory():
                self.stage.watch(begin)
                self.clock.run()
        finally:
            for coroutine in first.values():
                coroutine.close()
        if self.stage.error is not None:
            raise self.stage.error
        running, errors, hung = self.stage.running, self.stage.errors, self.stage.find_hung()
        lost = self.stage.crashed | hung
        if errors and lost.issuperset(running):
            raise next(iter(errors.values()))
        if hung and lost.issuperset(running):
            ranks = ", ".join(map(str, sorted(hung)))
            raise RunLost(f"all replicas that are left hang for ever, as the fault plan says: rank {ranks}")
        left = [rank for rank in sorted(running) if rank not in lost]
        stuck = [rank for rank in left if not running[rank].done]
        if stuck:
            networks = [one for one in (self.network, self.off_clock) if one is not None]
            waits = [next(filter(None, (one.waits_for(rank) for one in networks)), "") for rank in stuck]
            raise RunLost(
                f"nothing is on its way at {self.clock.now():.6f} virtual seconds: "
                + "; ".join(
                    f"rank {rank} waits for {what or 'something other than a message'}"
                    for rank, what in zip(stuck, waits, strict=True)
                )
            )
        return [running[rank].result() for rank in left]

    def _renewed(self, rank: int) -> VirtualRuntime:
        """A runtime for a replica that comes in again; nothing comes to it that was for the one before."""
        self.network.mailboxes[rank] = Mailbox()
        runtime = self.runtimes[rank] = VirtualRuntime(self, rank, self.runtimes[rank].device)
        self.network.charge([one.lane for one in self.runtimes])
        return runtime

    def settle_collective(
        self, name: str, nbytes: Sequence[int], *, step: int = 0, fresh: bool = False
    ) -> str:
        """What ``auto`` stands for from now on, by the world's profile; recorded, and takes no time.

        Args:
          name: the collective that was asked for; any but ``auto`` is settled already.
          nbytes: of the tensors summed in a step.
          step: the first of the run.
          fresh: whether to leave aside what the run that is replayed decided, as on another network than its own.

        Returns:
          The name of the collective that the replicas use; for ``auto`` those of all sizes, the largest tensor's first.

        Raises:
          UnknownName: no such collective.
        """
        collective_named(name)
        if name != AUTO:
            return name
        found = collectives_of(nbytes, len(self.runtimes), self.network.profile)
        if fresh:
            decision = Decision(COLLECTIVE, step, found, timing=False)
            self.decisions.record(decision)
        else:
            decision = self.decisions.decide(COLLECTIVE, step, lambda: found, timing=False)
        names = [adopt_collectives(runtime.comm, decision) for runtime in self.runtimes]
        return names[0]


@contextmanager
def _settled_memory() -> Iterator[None]:
    """Spares the collector of cyclic garbage what is there already, and most searches of messages on their way.

    Models and modules stay until the end. Messages are no garbage either, and among a thousand replicas there are a
    million of them at a time: to go through all took a third of a simulation.
    """
    mine, (first, second, third) = not gc.get_freeze_count(), gc.get_threshold()
    if mine:
        gc.freeze()
    gc.set_threshold(first, second, SELDOM * third)
    try:
        yield
    finally:
        gc.set_threshold(first, second, third)
        if mine:
            gc.unfreeze()


def _devices(
    size: int, device: DeviceProfile | Sequence[DeviceProfile] | None, seconds_per_sample: float
) -> Sequence[DeviceProfile]:
    if device is None:
        device = DeviceProfile(forward_s=seconds_per_sample)
    elif seconds_per_sample:
        raise ConfigError("give seconds_per_sample or a device profile, not both")
    devices = [device] * size if isinstance(device, DeviceProfile) else device
    if len(devices) != size:
        raise ConfigError(f"{len(devices)} device profiles for {size} replicas: give one, or one for each")
    return devices


class VirtualRuntime:
    """One replica's seam to a :class:`VirtualWorld`; see :class:`farflung.types.Runtime`."""

    def __init__(
        self,
        world: VirtualWorld,
        rank: int,
        device: DeviceProfile,
        network: VirtualNetwork | None = None,
    ) -> None:
        self.comm: Communicator = (network or world.network).communicator(rank)
        self.elastic: Elastic | None = None
        self.events = 0
        self.device = device
        self.off_clock: VirtualRuntime | None = None
        if network is None and world.off_clock is not None:
            self.off_clock = _OffClock(world, rank, DeviceProfile(), world.off_clock)
        self._world = world
        self._forwards = 0
        self.lane: Lane | None = None
        """What its exchanges compute is charged to."""
        if device.coding is not None:
            stage = world.stage
            self.lane = Lane(
                device.coding,
                encrypted=world.encrypted,
                slowdown=self._slowdown,
                now=partial(stage.running_s, rank),
                at=partial(stage.when_running, rank),
            )
        self.soon = world.stage.soon_of(rank)
        """Queues a step of one of this replica's coroutines."""

    @property
    def decisions(self) -> DecisionLog:
        return self._world.decisions

    def address_of(self, rank: int) -> str | None:
        return None

    def now(self) -> float:
        return self._world.clock.now()

    def sleep_until(self, t: float) -> Pending[None]:
        """Done when the clock shows ``t``."""
        reached: Pending[None] = Pending()
        self._world.clock.at(t, lambda: reached.set(None))
        return reached

    def first_of(self, *pendings: Pending[Any]) -> Pending[int]:
        """The index of whichever completes first."""
        return tasks.first_of(pendings)

    def wait_for_data(self, ready: Pending[None] | float) -> Pending[None]:
        """Done at a time; the clock stands still for what another thread completes."""
        if isinstance(ready, Pending):
            ready.block()
            return ready
        arrived = self.sleep_until(ready)
        self._world.stage.waits_for_data(self.comm.rank, arrived)
        return arrived

    def compute(self, cost: Cost, fn: Callable[[], T]) -> Pending[T]:
        """Computes now, and is done when the modelled seconds have passed.

        A forward pass is computed at the end of its time instead, just before its backward pass: else the activations
        of all replicas would be there at once.
        """
        self.events += 1
        finished: Pending[T] = Pending()
        seconds = self._seconds(cost)
        if cost.kind == "forward":
            self._after(seconds, lambda: _complete(finished, fn))
        else:
            value = fn()
            self._after(seconds, lambda: finished.set(value))
        return finished

    def backward(
        self, cost: Cost, fn: Callable[[Callable[[int], None]], None], on_ready: Callable[[int], None]
    ) -> Pending[None]:
        """Computes now; each bucket is ready when the device has come to it; see
        :meth:`farflung.devices.DeviceProfile.ready_at`.
        """
        self.events += 1
        order: list[int] = []
        fn(order.append)
        finished: Pending[None] = Pending()
        seconds = self._seconds(cost)
        for bucket, share in zip(order, self.device.ready_at(order, cost.numels), strict=True):
            self._after(seconds * share, partial(on_ready, bucket))
        self._after(seconds, lambda: finished.set(None))
        return finished

    def launch(self, exchange: Coroutine[Pending[Any], None, T]) -> Pending[T]:
        """Starts an exchange on the same clock."""
        return Task(exchange, self.soon)

    def decide(self, name: str, step: int, local: Callable[[], Json]) -> Pending[Decision]:
        return self.launch(decide_by_rank_0(self.comm, self._world.decisions, name, step, local))

    def decide_own(self, name: str, step: int, local: Callable[[], Json]) -> Decision:
        return self._world.decisions.decide(name, step, local, self.comm.rank)

    def _seconds(self, cost: Cost) -> float:
        if cost.kind == "forward":
            self._forwards += 1
        return self._world.stage.slowed(self.comm.rank) * self.device.seconds(cost, self._moment())

    def _slowdown(self) -> float:
        """How many times as long everything takes now."""
        slowed = self._world.stage.slowed(self.comm.rank)
        return slowed * (
            self.device.slowdown_at(self._moment()) if self.device.stragglers else self.device.slowdown
        )

    def _moment(self) -> Moment:
        return Moment(self._world.seed, self.comm.rank, self._forwards, self.now())

    def _after(self, seconds: float, fn: Callable[[], None]) -> None:
        if self.lane is None or self.device.codes_beside:
            stage, rank = self._world.stage, self.comm.rank
            stage.when_running(rank, stage.running_s(rank) + seconds, fn)
        else:
            self.lane.beside(seconds, fn)


class _OffClock(VirtualRuntime):
    """A replica's seam to what takes no time: see :attr:`farflung.types.Runtime.off_clock`."""

    @override
    def launch(self, exchange: Coroutine[Pending[Any], None, T]) -> Pending[T]:
        """Starts at once, with the replica as it is now."""
        return Task(exchange, self.soon, at_once=True)


def _complete(pending: Pending[T], fn: Callable[[], T]) -> None:
    try:
        value = fn()
    except Exception as error:
        pending.fail(error)
    else:
        pending.set(value)
