"""A machine that several replicas share, as each of them finds it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from farflung.errors import ConfigError, RunLost

__all__ = ["Sharing", "company"]


@dataclass(frozen=True, slots=True)
class Sharing:
    """How many compute at once, and on how many processors.

    Args:
      replicas: on this machine.
      threads: of torch, in each.
      processors: that all of them may use; this process's when not given.

    Raises:
      ConfigError: none, or replicas of several threads that have to take turns, which no clock of one tells apart.
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
        if self.threads > 1 and self.turns > 1:
            raise ConfigError(
                f"--threads {self.threads}: {self.replicas} replicas of as many threads do not fit on "
                f"{self.processors} processors: give each one"
            )

    @property
    def turns(self) -> float:
        """How many times as long everything takes because others have their turns."""
        return max(1.0, self.replicas * self.threads / self.processors)

    @property
    def cores(self) -> float:
        """For :class:`farflung.devices.DeviceProfile`: 2 where what codes takes no turn from what computes."""
        return min(2.0, 2 * self.processors / (self.replicas * (self.threads + 1)))

    def clock(self) -> float:
        """Seconds for what one thread does: of its processor, and the turns that others would have meanwhile.

        What else the machine does has no part in it. With several threads of torch's, seconds on the wall.
        """
        return time.perf_counter() if self.threads > 1 else self.turns * time.thread_time()


@contextmanager
def company(others: int, work: Callable[[], Iterator[None]]) -> Iterator[None]:
    """Inside, other processes work too, so that memory and caches are shared as they would be.

    Args:
      others: how many.
      work: what each does, piece by piece, for as long as it is asked.

    Raises:
      RunLost: one of them has ended by itself.
    """
    parent, pids = os.getpid(), list[int]()
    try:
        for _ in range(others):
            pid = os.fork()
            if pid == 0:
                _keep_company(work, parent)
            pids.append(pid)
        yield
        ended = [pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0]]
        if ended:
            pids = [pid for pid in pids if pid not in ended]
            raise RunLost(
                f"{len(ended)} of {others} processes that were to compute beside this one have ended"
            )
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _keep_company(work: Callable[[], Iterator[None]], parent: int) -> None:
    """Works until the process that asked for it is gone; never returns."""
    try:
        for _ in work():
            if os.getppid() != parent:
                break
    finally:
        os._exit(1)
