"""Virtual world: one heap of ``(time, priority, sequence)`` drives all replicas in one thread, deterministically."""

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
"""Factor by which full searches for cyclic garbage are rarer in a simulation."""


class VirtualWorld:
    """World of ``size`` replicas on one virtual clock.

    Args:
      size: Number of replicas.
      network: Profile, or the link of each ordered pair; without one, messages take no time.
      seconds_per_sample: Seconds of a forward pass per sample; a backward pass takes twice as long.
      device: Device profile in place of ``seconds_per_sample``, or one for each replica.
      seed: Seed of jitter and stragglers.
      faults: Faults to inject; replicas report their steps to :attr:`injector`.
      deadline_s: Virtual seconds that an awaited replica may be silent, if the plan has faults.
      decisions: Log of decisions; a new one when not given.
      count_evaluation: Lets evaluations and checkpoints take time; see :attr:`VirtualRuntime.untimed`.
      needs_all_members: Ends the view with the first lost replica, because every exchange needs all. If False, only
        messages of lost or ended replicas fail, and faults may have replicas leave and join. A replica whose first
        fault is to join is absent at the start.
      absent_ranks: Ranks absent at the start, besides those whose first fault is to join.

    Raises:
      ConfigError: Profiles or faults are for another number of replicas.
      Unsupported: Virtual time does not support a fault.
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
        """True if messages are encrypted, as those of real runs between machines are."""
        self.network = VirtualNetwork(
            self.clock, size, network or Link(), seed=seed, encrypted=self.encrypted
        )
        self.off_clock: VirtualNetwork | None = None
        """Network whose messages take no virtual time; it has the losses and deadlines of :attr:`network`."""
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
        """Sink for the events of all replicas."""
        self.runtimes = [
            VirtualRuntime(self, rank, profile)
            for rank, profile in enumerate(_devices(size, device, seconds_per_sample))
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
        """Drives one coroutine of each replica to its end.

        Args:
          coroutines: Coroutines by rank; that of an absent rank begins when the rank is admitted.
          build_rejoined: Builds the coroutine of a rank that is admitted again, from a new runtime; its result
            counts.

        Returns:
          The results in rank order, without ranks that crashed, left by a fault, hang for ever, or were never
          admitted.

        Raises:
          ConfigError: A rank is admitted again, and ``build_rejoined`` is not given.
          RunLost: A rank was lost, or all ranks that do not hang wait and no message is in flight.
          BaseException: The error of the first replica that failed.
        """
        waiting = dict(enumerate(coroutines))

        def begin(rank: int) -> Task[T]:
            if rank in waiting:
                return Task(waiting.pop(rank), self.runtimes[rank].soon)
            if again is None:
                raise ConfigError(
                    f"rank {rank} comes in again: say what it runs by run(coroutines, again=...)"
                )
            runtime = self._renewed(rank)
            return Task(again(runtime), runtime.soon)

        if len(waiting) != len(self.runtimes):
            raise ConfigError(f"{len(waiting)} coroutines for {len(self.runtimes)} replicas")
        try:
            with RandomState.scope(), _settled_memory():
                self.stage.watch(begin)
                self.clock.run()
        finally:
            for coroutine in waiting.values():
                coroutine.close()
        if self.stage.error is not None:
            raise self.stage.error
        running, errors, hung = self.stage.running, self.stage.errors, self.stage.find_hung()
        lost_ranks = self.stage.crashed | hung
        if errors and lost_ranks.issuperset(running):
            raise next(iter(errors.values()))
        if hung and lost_ranks.issuperset(running):
            ranks = ", ".join(map(str, sorted(hung)))
            raise RunLost(f"all replicas that are left hang for ever, as the fault plan says: rank {ranks}")
        remaining = [rank for rank in sorted(running) if rank not in lost_ranks]
        stuck = [rank for rank in remaining if not running[rank].done]
        if stuck:
            networks = [net for net in (self.network, self.off_clock) if net is not None]
            waits = [next(filter(None, (net.waits_for(rank) for net in networks)), "") for rank in stuck]
            raise RunLost(
                f"nothing is on its way at {self.clock.now():.6f} virtual seconds: "
                + "; ".join(
                    f"rank {rank} waits for {wait or 'something other than a message'}"
                    for rank, wait in zip(stuck, waits, strict=True)
                )
            )
        return [running[rank].result() for rank in remaining]

    def _renewed(self, rank: int) -> VirtualRuntime:
        """Creates the runtime of a rank that is admitted again; messages to its earlier runtime do not reach it."""
        self.network.mailboxes[rank] = Mailbox()
        runtime = self.runtimes[rank] = VirtualRuntime(self, rank, self.runtimes[rank].device)
        self.network.charge([member.lane for member in self.runtimes])
        return runtime

    def settle_collective(
        self, name: str, nbytes: Sequence[int], *, step: int = 0, fresh: bool = False
    ) -> str:
        """Resolves ``auto`` by the world's profile; the decision is recorded, and takes no time.

        Args:
          name: Requested collective; any but ``auto`` is returned unchanged.
          nbytes: Sizes of the tensors summed in a step.
          step: First step of the run.
          ignores_replay: Decides again instead of following the replayed run, as on another network.

        Returns:
          Name of the collective that the replicas use; for ``auto`` those of all sizes, the largest tensor's first.

        Raises:
          UnknownName: The collective does not exist.
        """
        collective_named(name)
        if name != AUTO:
            return name
        collectives = collectives_of(nbytes, len(self.runtimes), self.network.profile)
        if fresh:
            decision = Decision(COLLECTIVE, step, collectives, timing=False)
            self.decisions.record(decision)
        else:
            decision = self.decisions.decide(COLLECTIVE, step, lambda: collectives, timing=False)
        names = [adopt_collectives(runtime.comm, decision) for runtime in self.runtimes]
        return names[0]


@contextmanager
def _settled_memory() -> Iterator[None]:
    """Reduces the work of the cyclic garbage collector during a simulation.

    Models and modules stay until the end. Messages are no garbage either, and among a thousand replicas there are a
    million of them at a time: full searches took a third of a simulation.
    """
    owns_freeze, (young, middle, old) = not gc.get_freeze_count(), gc.get_threshold()
    if owns_freeze:
        gc.freeze()
    gc.set_threshold(young, middle, SELDOM * old)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        if owns_freeze:
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
    """Runtime of one replica in a :class:`VirtualWorld`; see :class:`farflung.types.Runtime`."""

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
        """Coding processor that exchanges are charged to."""
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
        """Completes when the clock shows ``t``."""
        pending: Pending[None] = Pending()
        self._world.clock.at(t, lambda: pending.set(None))
        return pending

    def first_of(self, *pendings: Pending[Any]) -> Pending[int]:
        """Completes with the index of the first to complete."""
        return tasks.first_of(pendings)

    def wait_for_data(self, ready: Pending[None] | float) -> Pending[None]:
        """Completes at a time; the clock stands still for a result of another thread."""
        if isinstance(ready, Pending):
            ready.block()
            return ready
        pending = self.sleep_until(ready)
        self._world.stage.waits_for_data(self.comm.rank, pending)
        return pending

    def compute(self, cost: Cost, fn: Callable[[], T]) -> Pending[T]:
        """Computes now, and completes when the modelled seconds have passed.

        A forward pass is computed at the end of its time, just before its backward pass. Otherwise the activations of
        all replicas would exist at once.
        """
        self.events += 1
        pending: Pending[T] = Pending()
        seconds = self._seconds(cost)
        if cost.kind == "forward":
            self._after(seconds, lambda: _complete(pending, fn))
        else:
            value = fn()
            self._after(seconds, lambda: pending.set(value))
        return pending

    def backward(
        self, cost: Cost, fn: Callable[[Callable[[int], None]], None], on_ready: Callable[[int], None]
    ) -> Pending[None]:
        """Computes now; buckets are ready at :meth:`farflung.devices.DeviceProfile.compute_ready_shares`."""
        self.events += 1
        order: list[int] = []
        fn(order.append)
        pending: Pending[None] = Pending()
        seconds = self._seconds(cost)
        for bucket, share in zip(order, self.device.ready_at(order, cost.numels), strict=True):
            self._after(seconds * share, partial(on_ready, bucket))
        self._after(seconds, lambda: pending.set(None))
        return pending

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
        """Returns the factor by which everything is slower now."""
        slowdown = self._world.stage.slowed(self.comm.rank)
        return slowdown * (
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
    """Runtime of a replica whose operations take no time; see :attr:`farflung.types.Runtime.untimed`."""

    @override
    def launch(self, exchange: Coroutine[Pending[Any], None, T]) -> Pending[T]:
        """Starts at once, with the replica's current state."""
        return Task(exchange, self.soon, at_once=True)


def _complete(pending: Pending[T], fn: Callable[[], T]) -> None:
    try:
        value = fn()
    except Exception as error:
        pending.fail(error)
    else:
        pending.set(value)
