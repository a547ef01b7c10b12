"""Sharing of one machine by several replicas."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from farflung.errors import ConfigError, RunLost

__all__ = ["ProcessorLoad", "run_neighbour_processes"]


@dataclass(frozen=True, slots=True)
class ProcessorLoad:
    """Number of replicas that compute at the same time, and of their processors.

    Args:
      replicas: Number of replicas on this machine.
      threads: Number of torch threads of each.
      processors: Number of processors for all of them; this process's by default.

    Raises:
      ConfigError: A number is below 1, or replicas of several threads take turns, which cannot be measured.
    """

    replicas: int = 1
    threads: int = 1
    processors: int = 0

    def __post_init__(self) -> None:
        if self.replicas < 1:
            raise ConfigError(f"--replicas {self.replicas}: must be 1 or more")
        if self.threads < 1:
            raise ConfigError(f"--threads {self.threads}: must be 1 or more")
        object.__setattr__(self, "processors", self.processors or len(os.sched_getaffinity(0)))
        if self.threads > 1 and self.slowdown > 1:
            raise ConfigError(
                f"--threads {self.threads}: {self.replicas} replicas of as many threads do not fit on "
                f"{self.processors} processors: give each one"
            )

    @property
    def slowdown(self) -> float:
        """Factor by which everything slows down because replicas take turns."""
        return max(1.0, self.replicas * self.threads / self.processors)

    @property
    def cores(self) -> float:
        """Cores for :class:`farflung.devices.DeviceProfile`; 2 if coding and computing never take turns."""
        return min(2.0, 2 * self.processors / (self.replicas * (self.threads + 1)))

    def read_clock(self) -> float:
        """Returns seconds of one thread's work: its processor time, and the turns of other replicas.

        Other load on the machine does not count. With several torch threads, it returns wall clock time.
        """
        return time.perf_counter() if self.threads > 1 else self.slowdown * time.thread_time()


@contextmanager
def run_neighbour_processes(count: int, endless_work: Callable[[], Iterator[None]]) -> Iterator[None]:
    """Runs endless work in forked processes during the block, to load memory and caches as replicas would.

    Args:
      count: Number of neighbours.
      endless_work: Function whose iterator never ends; it yields after each piece of work.

    Raises:
      RunLost: A neighbour has ended by itself.
    """
    parent, pids = os.getpid(), list[int]()
    try:
        for _ in range(count):
            pid = os.fork()
            if pid == 0:
                _run_neighbour(endless_work, parent)
            pids.append(pid)
        yield
        ended_pids = [pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]]
        if ended_pids:
            pids = [pid for pid in pids if pid not in ended_pids]
            raise RunLost(
                f"{len(ended_pids)} of {count} processes that compute at the same time as this one have ended"
            )
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _run_neighbour(endless_work: Callable[[], Iterator[None]], parent: int) -> None:
    """Works until the parent process is gone, then exits; never returns."""
    try:
        for _ in endless_work():
            if os.getppid() != parent:
                break
    finally:
        os._exit(1)
