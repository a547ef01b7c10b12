"""Virtual time: one heap of ``(time, priority, sequence)`` drives all replicas in one thread, deterministically."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

from farflung import tasks
from farflung.comm import VirtualNetwork
from farflung.errors import ConfigError, RunLost
from farflung.network import Link, NetworkProfile
from farflung.runtime.decisions import DecisionLog, decide_by_rank_0
from farflung.seeding import RandomState
from farflung.tasks import Pending, Task
from farflung.types import Communicator, Cost, Decision, Json

__all__ = ["VirtualClock", "VirtualRuntime", "VirtualWorld"]

T = TypeVar("T")


class VirtualClock:
    """The heap: callbacks at virtual times, ties broken by priority and then by who asked first."""

    def __init__(self) -> None:
        self._now = 0.0
        self._heap: list[tuple[float, int, int, Callable[[], None]]] = []
        self._soon: deque[Callable[[], None]] = deque()
        self._sequence = 0

    def now(self) -> float:
        """Virtual seconds since the beginning."""
        return self._now

    def at(self, t: float, fn: Callable[[], None], priority: int = 0) -> None:
        """Runs ``fn`` when the clock shows ``t``; lower ``priority`` first among equal times."""
        self._sequence += 1
        heapq.heappush(self._heap, (max(t, self._now), priority, self._sequence, fn))

    def soon(self, fn: Callable[[], None]) -> None:
        """Runs ``fn`` before the clock moves on."""
        self._soon.append(fn)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while True:
            while self._soon:
                self._soon.popleft()()
            if not self._heap:
                return
            self._now, _, _, fn = heapq.heappop(self._heap)
            fn()


class VirtualWorld:
    """``size`` replicas on one clock.

    Args:
      size: number of replicas.
      link: the link that every ordered pair of them has for itself; without one, messages take no time.
      seconds_per_sample: what a forward pass costs per sample; a backward pass costs twice that, our choice
        until a device profile says otherwise.
      network: a profile, in the place of ``link``.
      seed: of jitter and stragglers.
      closed_form: whether collectives may be computed as a whole; see :class:`farflung.comm.VirtualNetwork`.

    Raises:
      ConfigError: both a link and a profile, or a profile of another number of nodes.
    """

    def __init__(
        self,
        size: int,
        link: Link | None = None,
        seconds_per_sample: float = 0.0,
        *,
        network: NetworkProfile | None = None,
        seed: int = 0,
        closed_form: bool = True,
    ) -> None:
        if link is not None and network is not None:
            raise ConfigError("give a link or a network profile, not both")
        self.clock = VirtualClock()
        self.network = VirtualNetwork(
            self.clock, size, network or link or Link(), seed=seed, closed_form=closed_form
        )
        self.seconds_per_sample = seconds_per_sample
        self.decisions = DecisionLog()
        self.runtimes = [VirtualRuntime(self, rank) for rank in range(size)]

    def run(self, coroutines: Sequence[Coroutine[Pending[Any], None, T]]) -> list[T]:
        """Drives one coroutine for each replica to its end; their results in rank order.

        Raises:
          RunLost: everybody waits and nothing is on its way; names who waits for whom.
        """
        with RandomState.scope():
            running = [Task(coroutine, self.clock.soon) for coroutine in coroutines]
            self.clock.run()
        for task in running:
            if task.done and task.error is not None:
                raise task.error
        stuck = [rank for rank, task in enumerate(running) if not task.done]
        if stuck:
            raise RunLost(self._deadlock(stuck))
        return [task.result() for task in running]

    def _deadlock(self, stuck: Sequence[int]) -> str:
        lines = []
        for rank in stuck:
            whom = self.network.waits_for(rank) or "something other than a message"
            lines.append(f"rank {rank} waits for {whom}")
        return f"nothing is on its way at {self.clock.now():.6f} virtual seconds: {'; '.join(lines)}"


class VirtualRuntime:
    """One replica's seam to a :class:`VirtualWorld`; see :class:`farflung.types.Runtime`."""

    def __init__(self, world: VirtualWorld, rank: int) -> None:
        self.comm: Communicator = world.network.communicator(rank)
        self._world = world

    def now(self) -> float:
        """Virtual seconds."""
        return self._world.clock.now()

    def sleep_until(self, t: float) -> Pending[None]:
        """Done when the clock shows ``t``."""
        reached: Pending[None] = Pending()
        self._world.clock.at(t, lambda: reached.set(None))
        return reached

    def first_of(self, *pendings: Pending[Any]) -> Pending[int]:
        """The index of whichever completes first."""
        return tasks.first_of(pendings)

    def compute(self, cost: Cost, fn: Callable[[], T]) -> Pending[T]:
        """Computes now, and is done when the modelled seconds have passed."""
        value = fn()
        finished: Pending[T] = Pending()
        self._world.clock.at(self.now() + self._seconds(cost), lambda: finished.set(value))
        return finished

    def backward(
        self, cost: Cost, fn: Callable[[Callable[[int], None]], None], on_ready: Callable[[int], None]
    ) -> Pending[None]:
        """Computes now; the buckets are ready at even steps of the modelled time, in the order they filled."""
        order: list[int] = []
        fn(order.append)
        begin, seconds = self.now(), self._seconds(cost)
        for place, bucket in enumerate(order, start=1):
            self._world.clock.at(begin + seconds * place / len(order), lambda b=bucket: on_ready(b))  # type: ignore[misc]
        return self.sleep_until(begin + seconds)

    def launch(self, exchange: Coroutine[Pending[Any], None, T]) -> Pending[T]:
        """Starts an exchange on the same clock."""
        return Task(exchange, self._world.clock.soon)

    def decide(self, name: str, step: int, local: Callable[[], Json]) -> Pending[Decision]:
        """Rank 0 decides."""
        return self.launch(decide_by_rank_0(self.comm, self._world.decisions, name, step, local))

    def _seconds(self, cost: Cost) -> float:
        factor = {"forward": 1.0, "backward": 2.0, "evaluate": 1.0, "score": 1.0}.get(cost.kind, 0.0)
        return factor * cost.samples * self._world.seconds_per_sample
