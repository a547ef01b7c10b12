"""Virtual world: one heap of ``(time, priority, sequence)`` drives all replicas in one thread, deterministically."""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

from typing_extensions import override

from farflung import tasks
from farflung.comm import AUTO, find_collective
from farflung.decisions import (
    COLLECTIVE,
    DecisionLog,
    apply_collectives,
    decide_by_rank_0,
    resolve_collectives,
)
from farflung.devices import DeviceProfile, Moment
from farflung.errors import ConfigError, RunLost
from farflung.faults import FaultInjector, FaultPlan
from farflung.network import Link, NetworkProfile
from farflung.seeding import RandomState
from farflung.sim.clock import VirtualClock
from farflung.sim.coding_processor import VirtualCodingProcessor
from farflung.sim.fault_environment import VirtualFaultEnvironment
from farflung.sim.network import UntimedAllReduce, VirtualNetwork
from farflung.tasks import Pending, Task
from farflung.types import Communicator, Cost, Decision, ElasticMembership, Json

__all__ = ["VirtualRuntime", "VirtualWorld"]

T = TypeVar("T")

DEADLINE_S = 60.0
GC_THRESHOLD_FACTOR = 100
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
        needs_all_members: bool = True,
        absent_ranks: Iterable[int] = (),
    ) -> None:
        faults = faults or FaultPlan()
        self.clock = VirtualClock()
        self.is_encrypted = network is not None
        """True if messages are encrypted, as those of real runs between machines are."""
        self.network = VirtualNetwork(
            self.clock, size, network or Link(), seed=seed, is_encrypted=self.is_encrypted
        )
        self.untimed_network: VirtualNetwork | None = None
        """Network whose messages take no virtual time; it has the losses and deadlines of :attr:`network`."""
        if not count_evaluation:
            self.untimed_network = VirtualNetwork(self.clock, size, Link(), mailboxes=self.network.mailboxes)
            if needs_all_members and not faults.faults:
                self.untimed_network.untimed_all_reduce = UntimedAllReduce()
        self.seed = seed
        self.decisions = decisions or DecisionLog()
        self.environment = VirtualFaultEnvironment(
            self.clock,
            self.network,
            faults,
            deadline_s,
            needs_all_members=needs_all_members,
            absent_ranks=absent_ranks,
        )
        if self.untimed_network is not None:
            self.untimed_network.membership = self.network.membership
        self.injector = FaultInjector(faults, self.environment)
        """Sink for the events of all replicas."""
        self.runtimes = [
            VirtualRuntime(self, rank, profile)
            for rank, profile in enumerate(_expand_devices(size, device, seconds_per_sample))
        ]
        self.environment.did_request_leave = self._did_request_leave
        self.environment.count_events = lambda rank: self.runtimes[rank].events
        self.network.set_coding_processors([runtime.coding_processor for runtime in self.runtimes])

    def _did_request_leave(self, rank: int) -> bool:
        elastic = self.runtimes[rank].elastic
        if elastic is not None:
            elastic.leave()
        return elastic is not None

    def run(
        self,
        coroutines: Sequence[Coroutine[Pending[Any], None, T]],
        *,
        build_rejoined: Callable[[VirtualRuntime], Coroutine[Pending[Any], None, T]] | None = None,
    ) -> list[T]:
        """Drives one coroutine of each replica to its end; returns the results of those that were not lost.

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
                return Task(waiting.pop(rank), self.runtimes[rank].call_soon)
            if build_rejoined is None:
                raise ConfigError(
                    f"rank {rank} comes in again: say what it runs by run(coroutines, build_rejoined=...)"
                )
            runtime = self._replace_runtime(rank)
            return Task(build_rejoined(runtime), runtime.call_soon)

        if len(waiting) != len(self.runtimes):
            raise ConfigError(f"{len(waiting)} coroutines for {len(self.runtimes)} replicas")
        try:
            with RandomState.preserve_globals(), _reduce_collections():
                self.environment.start_replicas(begin)
                self.clock.run()
        finally:
            for coroutine in waiting.values():
                coroutine.close()
        if self.environment.error is not None:
            raise self.environment.error
        running = self.environment.running_tasks
        errors = self.environment.rank_errors
        hung = self.environment.find_hung()
        lost_ranks = self.environment.crashed_ranks | hung
        if errors and lost_ranks.issuperset(running):
            raise next(iter(errors.values()))
        if hung and lost_ranks.issuperset(running):
            ranks = ", ".join(map(str, sorted(hung)))
            raise RunLost(f"all replicas that are left hang for ever, as the fault plan says: rank {ranks}")
        remaining = [rank for rank in sorted(running) if rank not in lost_ranks]
        stuck = [rank for rank in remaining if not running[rank].is_done]
        if stuck:
            networks = [net for net in (self.network, self.untimed_network) if net is not None]
            waits = [next(filter(None, (net.describe_wait(rank) for net in networks)), "") for rank in stuck]
            raise RunLost(
                f"nothing is on its way at {self.clock.time():.6f} virtual seconds: "
                + "; ".join(
                    f"rank {rank} waits for {wait or 'something other than a message'}"
                    for rank, wait in zip(stuck, waits, strict=True)
                )
            )
        return [running[rank].result() for rank in remaining]

    def _replace_runtime(self, rank: int) -> VirtualRuntime:
        """Replaces runtime and mailbox of a rank that is admitted again; earlier messages do not reach it."""
        self.network.mailboxes[rank] = self.network.create_mailbox()
        runtime = self.runtimes[rank] = VirtualRuntime(self, rank, self.runtimes[rank].device)
        self.network.set_coding_processors([member.coding_processor for member in self.runtimes])
        return runtime

    def resolve_collective(
        self, name: str, nbytes: Sequence[int], *, step: int = 0, ignores_replay: bool = False
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
        find_collective(name)
        if name != AUTO:
            return name
        collectives = resolve_collectives(nbytes, len(self.runtimes), self.network.profile)
        if ignores_replay:
            decision = Decision(COLLECTIVE, step, collectives, timing=False)
            self.decisions.record(decision)
        else:
            decision = self.decisions.decide(COLLECTIVE, step, lambda: collectives, timing=False)
        names = [apply_collectives(runtime.comm, decision) for runtime in self.runtimes]
        return names[0]


@contextmanager
def _reduce_collections() -> Iterator[None]:
    """Reduces the work of the cyclic garbage collector during a simulation.

    Models and modules stay until the end. Messages are no garbage either, and among a thousand replicas there are a
    million of them at a time: full searches took a third of a simulation.
    """
    owns_freeze, (young, middle, old) = not gc.get_freeze_count(), gc.get_threshold()
    if owns_freeze:
        gc.freeze()
    gc.set_threshold(young, middle, GC_THRESHOLD_FACTOR * old)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        if owns_freeze:
            gc.unfreeze()


def _expand_devices(
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
        self.comm: Communicator = (network or world.network).create_communicator(rank)
        self.elastic: ElasticMembership | None = None
        self.events = 0
        self.device = device
        self.untimed: VirtualRuntime | None = None
        if network is None and world.untimed_network is not None:
            self.untimed = _UntimedRuntime(world, rank, DeviceProfile(), world.untimed_network)
        self._world = world
        self._num_forwards = 0
        self.coding_processor: VirtualCodingProcessor | None = None
        """Coding processor that exchanges are charged to."""
        if device.coding is not None:
            stage = world.environment
            self.coding_processor = VirtualCodingProcessor(
                device.coding,
                is_encrypted=world.is_encrypted,
                slowdown=self._get_slowdown,
                read_running_s=partial(stage.get_running_s, rank),
                call_when_running=partial(stage.call_when_running, rank),
            )
        self.call_soon = world.environment.build_call_soon(rank)
        """Queues a step of one of this replica's coroutines."""

    @property
    def decisions(self) -> DecisionLog:
        return self._world.decisions

    def get_address(self, rank: int) -> str | None:
        return None

    def read_clock(self) -> float:
        return self._world.clock.time()

    def sleep_until(self, t: float) -> Pending[None]:
        """Completes when the clock shows ``t``."""
        pending: Pending[None] = Pending()
        self._world.clock.call_at(t, lambda: pending.set_result(None))
        return pending

    def wait_any(self, *pendings: Pending[Any]) -> Pending[int]:
        """Completes with the index of the first to complete."""
        return tasks.wait_any(pendings)

    def wait_for_data(self, ready: Pending[None] | float) -> Pending[None]:
        """Completes at a time; the clock stands still for a result of another thread."""
        if isinstance(ready, Pending):
            ready.wait_until_done()
            return ready
        pending = self.sleep_until(ready)
        self._world.environment.mark_data_wait(self.comm.rank, pending)
        return pending

    def compute(self, cost: Cost, fn: Callable[[], T]) -> Pending[T]:
        """Computes now, and completes when the modelled seconds have passed.

        A forward pass is computed at the end of its time, just before its backward pass. Otherwise the activations of
        all replicas would exist at once.
        """
        self.events += 1
        pending: Pending[T] = Pending()
        seconds = self._compute_seconds(cost)
        if cost.kind == "forward":
            self._call_after(seconds, lambda: _complete(pending, fn))
        else:
            value = fn()
            self._call_after(seconds, lambda: pending.set_result(value))
        return pending

    async def run_forward(
        self,
        cost: Cost,
        order: Sequence[int],
        fn: Callable[[Callable[[int], None]], T],
        prepare: Callable[[int], Coroutine[Pending[Any], None, None]],
    ) -> T:
        """Charges layer by layer, as in :meth:`farflung.devices.DeviceProfile.compute_use_fractions`; computes last."""
        self.events += 1
        seconds, elapsed_s = self._compute_seconds(cost), 0.0
        for bucket, share in zip(order, self.device.compute_use_fractions(order, cost), strict=True):
            await self._charge(seconds * share - elapsed_s)
            elapsed_s = seconds * share
            await prepare(bucket)
        await self._charge(seconds - elapsed_s)
        return fn(lambda bucket: None)

    def run_backward(
        self, cost: Cost, fn: Callable[[Callable[[int], None]], None], on_ready: Callable[[int], None]
    ) -> Pending[None]:
        """Computes now; buckets are ready at :meth:`farflung.devices.DeviceProfile.compute_ready_fractions`."""
        self.events += 1
        order: list[int] = []
        fn(order.append)
        pending: Pending[None] = Pending()
        seconds = self._compute_seconds(cost)
        for bucket, share in zip(order, self.device.compute_ready_fractions(order, cost.numels), strict=True):
            self._call_after(seconds * share, partial(on_ready, bucket))
        self._call_after(seconds, lambda: pending.set_result(None))
        return pending

    def launch(self, exchange: Coroutine[Pending[Any], None, T]) -> Pending[T]:
        """Starts an exchange on the same clock."""
        return Task(exchange, self.call_soon)

    def decide(self, name: str, step: int, local: Callable[[], Json]) -> Pending[Decision]:
        return self.launch(decide_by_rank_0(self.comm, self._world.decisions, name, step, local))

    def decide_locally(self, name: str, step: int, local: Callable[[], Json]) -> Decision:
        return self._world.decisions.decide(name, step, local, self.comm.rank)

    def _compute_seconds(self, cost: Cost) -> float:
        """Counts a forward pass; returns the seconds of a computation."""
        if cost.kind == "forward":
            self._num_forwards += 1
        return self._world.environment.get_slowdown(self.comm.rank) * self.device.compute_seconds(
            cost, self._build_moment()
        )

    def _get_slowdown(self) -> float:
        """Returns the factor by which everything is slower now."""
        slowdown = self._world.environment.get_slowdown(self.comm.rank)
        return slowdown * (
            self.device.compute_slowdown(self._build_moment())
            if self.device.stragglers
            else self.device.slowdown
        )

    def _build_moment(self) -> Moment:
        return Moment(self._world.seed, self.comm.rank, self._num_forwards, self.read_clock())

    def _charge(self, seconds: float) -> Pending[None]:
        """Completes when the device has computed for some seconds."""
        pending: Pending[None] = Pending()
        self._call_after(seconds, lambda: pending.set_result(None))
        return pending

    def _call_after(self, seconds: float, fn: Callable[[], None]) -> None:
        if self.coding_processor is None or self.device.can_overlap_coding:
            stage, rank = self._world.environment, self.comm.rank
            stage.call_when_running(rank, stage.get_running_s(rank) + seconds, fn)
        else:
            self.coding_processor.call_after_compute(seconds, fn)


class _UntimedRuntime(VirtualRuntime):
    """Runtime of a replica whose operations take no time; see :attr:`farflung.types.Runtime.untimed`."""

    @override
    def launch(self, exchange: Coroutine[Pending[Any], None, T]) -> Pending[T]:
        """Starts at once, with the replica's current state."""
        return Task(exchange, self.call_soon, eager_start=True)


def _complete(pending: Pending[T], fn: Callable[[], T]) -> None:
    try:
        value = fn()
    except Exception as error:
        pending.set_exception(error)
    else:
        pending.set_result(value)
