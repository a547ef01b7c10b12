"""Where the time of steps goes: processor time by thread, arithmetic of exchanges by operation, bytes sent."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self, TypeVar

from farflung.comm import ExchangeChannel
from farflung.types import CodingCost

__all__ = ["MAIN", "ROLES", "Memory", "Meter"]

T = TypeVar("T")
ROLES = (MAIN, COMMUNICATION, OTHERS) = ("main thread", "communication thread", "gloo and others")
"""Threads of a process, by what they do."""
TASKS = Path("/proc/self/task")
STATUS = Path("/proc/self/status")
FORGET = Path("/proc/self/clear_refs")
SENT = Path("/proc/self/net/dev")


class Meter:
    """One for a process."""

    def __init__(self) -> None:
        self._coding_s: defaultdict[str, float] = defaultdict(float)

    @contextmanager
    def stopwatch(self) -> Iterator[None]:
        """Inside, all that exchanges compute is timed, which takes microseconds itself."""
        compute, coding_s = ExchangeChannel.compute, self._coding_s

        def timed(channel: ExchangeChannel, cost: CodingCost, fn: Callable[[], T]) -> T:
            begin = time.thread_time()
            value = compute(channel, cost, fn)
            coding_s[cost.operation] += time.thread_time() - begin
            return value

        ExchangeChannel.compute = timed  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            ExchangeChannel.compute = compute  # type: ignore[method-assign]

    def read(self) -> dict[str, float]:
        """So far: processor milliseconds of each thread, those of exchanges' arithmetic by operation, and kB sent.

        The arithmetic is part of the communication thread's. Bytes are those of all interfaces but loopback, with the
        headers of TCP.
        """
        found: defaultdict[str, float] = defaultdict(float)
        own = {thread.native_id: thread.name for thread in threading.enumerate()}
        for task in TASKS.iterdir():
            try:
                name = (task / "comm").read_text().strip()
                spent_s = time.clock_gettime(
                    ~int(task.name) << 3 | 6
                )  # the kernel's number of a thread's clock
            except OSError:  # it has ended
                continue
            found[_role(int(task.name), own.get(int(task.name), name))] += 1e3 * spent_s
        for operation, spent_s in self._coding_s.items():
            found[f"coding: {operation}"] = 1e3 * spent_s
        for line in SENT.read_text().splitlines()[2:]:
            interface, fields = line.split(":")
            if interface.strip() != "lo":
                found["kB sent"] += int(fields.split()[8]) / 1e3
        return found

    def since(self, before: Mapping[str, float]) -> dict[str, float]:
        """What has been added to an earlier reading, but for what has not changed."""
        added = {name: now - before.get(name, 0.0) for name, now in self.read().items()}
        return {name: spent for name, spent in added.items() if spent}


def _role(task: int, name: str) -> str:
    if task == os.getpid():
        return MAIN
    return COMMUNICATION if name == "farflung-communication" else OTHERS


class Memory:
    """Measures the memory that what is inside takes, at most and at any time afterwards."""

    most_nbytes = 0
    """At most, above what was held before."""

    def __enter__(self) -> Self:
        FORGET.write_text("5")  # the most so far
        self._before = _resident("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.most_nbytes = _resident("VmHWM") - self._before

    def grown_nbytes(self) -> int:
        """Returns what is held now, above what was held before."""
        return _resident("VmRSS") - self._before


def _resident(name: str) -> int:
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024
