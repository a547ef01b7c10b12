"""Where the time of steps goes: processor time by thread, arithmetic of exchanges by operation, bytes sent."""

from __future__ import annotations

import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Self
from unittest.mock import patch

from farflung.comm import ExchangeChannel
from farflung.engine.reducer_states import ReducerStates

__all__ = ["MAIN", "ROLES", "WAKES", "Memory", "Meter"]

ROLES = (MAIN, COMMUNICATION, OTHERS) = ("main thread", "communication thread", "gloo and others")
"""Threads of a process, by what they do."""
WAKES = "wakes of the communication thread"
BOUNDS = (
    *((ExchangeChannel, name) for name in ("reserve_hops", "send", "recv", "wait_computed")),
    (ReducerStates, "update"),
)
"""Methods that end a charged operation."""
TASKS = Path("/proc/self/task")
STATUS = Path("/proc/self/status")
FORGET = Path("/proc/self/clear_refs")
SENT = Path("/proc/self/net/dev")


class Meter:
    """One for a process."""

    def __init__(self) -> None:
        self._coding_s: defaultdict[str, float] = defaultdict(float)
        self._running: dict[int, tuple[str, float]] = {}
        """Charged operation of each thread, and the thread's time when it began."""

    @contextmanager
    def stopwatch(self) -> Iterator[None]:
        """Inside, charged operations are timed until the channel's next call, which takes microseconds itself."""
        charge = ExchangeChannel.charge

        def begin(channel: ExchangeChannel, operation: str, *args: Any) -> None:
            self._end_operation()
            charge(channel, operation, *args)
            self._running[threading.get_ident()] = operation, time.thread_time()

        def bound(method: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                self._end_operation()
                value = method(*args, **options)
                self._end_operation()
                return value

            return call

        with ExitStack() as patches:
            patches.enter_context(patch.object(ExchangeChannel, "charge", begin))
            for owner, name in BOUNDS:
                patches.enter_context(patch.object(owner, name, bound(getattr(owner, name))))
            yield

    def _end_operation(self) -> None:
        operation, begin_s = self._running.pop(threading.get_ident(), ("", 0.0))
        if operation:
            self._coding_s[operation] += time.thread_time() - begin_s

    def read(self) -> dict[str, float]:
        """So far: processor milliseconds of each thread, those of exchanges' arithmetic by operation, kB sent, wakes.

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
                waits = _read_count(task / "status", "voluntary_ctxt_switches")
            except OSError:  # it has ended
                continue
            role = _role(int(task.name), own.get(int(task.name), name))
            found[role] += 1e3 * spent_s
            if role == COMMUNICATION:
                found[WAKES] += waits
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
        self._before = 1024 * _read_count(STATUS, "VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        self.most_nbytes = 1024 * _read_count(STATUS, "VmHWM") - self._before

    def grown_nbytes(self) -> int:
        """Returns what is held now, above what was held before."""
        return 1024 * _read_count(STATUS, "VmRSS") - self._before


def _read_count(status: Path, name: str) -> int:
    (line,) = (line for line in status.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1])
