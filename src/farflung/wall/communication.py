"""Thread that carries all exchanges of a real replica: messages, timers, deadlines."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from typing_extensions import override

from farflung.comm import View
from farflung.errors import RunLost
from farflung.tasks import Pending, Task

__all__ = ["CommunicationThread"]

T = TypeVar("T")

_LEFT = "this rank has left the run, and exchanges nothing after finish() or close(): take states and averages before"


class CommunicationThread(threading.Thread):
    """Thread that owns the sockets of a view's transport, runs tasks and timers, and ends the view after a deadline.

    Other threads reach it only by :meth:`call_soon`, which wakes it through a socket pair.
    """

    def __init__(self, view: View, now: Callable[[], float], deadline_s: float) -> None:
        super().__init__(name="farflung-communication", daemon=True)
        self._view, self._now, self._deadline_s = view, now, deadline_s
        self._soon: deque[Callable[[], None]] = deque()
        self._sleeping = False
        self._stopping = False
        self._launched: set[Pending[Any]] = set()
        self._lost: RunLost | None = None
        self._spent_s: float | None = None
        self._bell, self._ear = socket.socketpair()
        self._ear.setblocking(False)
        view.transport.watch(self._ear.fileno(), self._heard)

    @property
    def cpu_s(self) -> float:
        """Processor seconds of the thread so far."""
        if self._spent_s is not None:
            return self._spent_s
        assert self.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))

    def soon(self, fn: Callable[[], None]) -> None:
        """Calls ``fn`` on this thread; usable from any thread."""
        self._soon.append(fn)
        if self._sleeping:
            self._bell.send(b"!")

    def at(self, t: float, fn: Callable[[], None]) -> None:
        """Calls ``fn`` when the clock reaches ``t``; usable from this thread only."""
        self._view.transport.call_later(t - self._now(), fn)

    def launch(self, coroutine: Coroutine[Pending[Any], None, T]) -> Pending[T]:
        """Runs a coroutine here; usable from any thread. It fails if this thread has ended or ends before."""
        task = Task(coroutine, self.soon)
        self._launched.add(task)
        task.on_done(self._launched.discard)
        if self._lost is not None:
            task.fail(self._lost)
            coroutine.close()
        return task

    def stop(self) -> None:
        """Ends the thread after its queued calls, and waits for the end."""

        def end() -> None:
            self._stopping = True

        self.soon(end)
        self.join()
        # Only now: `call_soon` may still send while the thread is past its last iteration.
        self._bell.close()
        self._ear.close()

    @override
    def run(self) -> None:
        """Runs the loop; an error in it fails everything that waits."""
        try:
            while not self._stopping:
                self._turn()
        except BaseException as error:
            failure = RunLost(f"the communication thread failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._end(failure)
            self._view.end(failure)
        finally:
            self._sleeping = False
            self._end(RunLost(_LEFT))
            self._view.close()
            self._spent_s = time.thread_time()

    def _end(self, lost: RunLost) -> None:
        """Fails all tasks, including those launched later."""
        self._lost = self._lost or lost
        for task in list(self._launched):
            task.fail(self._lost)

    def _turn(self) -> None:
        while self._soon:
            self._soon.popleft()()
        look_again = self._view.waits.check(self._deadline_s)
        self._sleeping = True
        # A callback queued before `_is_sleeping` was set has sent no wakeup: check again.
        is_due = self._soon or self._stopping
        left_s = None if look_again is None else max(0.0, look_again - self._now())
        self._view.transport.poll(0.0 if is_due else left_s)
        self._sleeping = False

    def _heard(self) -> None:
        self._ear.recv(4096)
