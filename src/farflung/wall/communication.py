"""Thread that carries all exchanges of a real replica: messages, timers, deadlines."""

from __future__ import annotations

import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from typing_extensions import override

from farflung.comm import ViewSession
from farflung.errors import RunLost
from farflung.tasks import Pending, Task

__all__ = ["CommunicationThread"]

T = TypeVar("T")

_LEFT_MESSAGE = (
    "this rank has left the run, and exchanges nothing after finish() or close(): take states and averages "
    "before"
)


class CommunicationThread(threading.Thread):
    """Thread that owns the sockets of a view's transport, runs tasks and timers, and ends the view after a deadline.

    Other threads reach it only by :meth:`call_soon`, which wakes it through a socket pair.
    """

    def __init__(self, session: ViewSession, read_clock: Callable[[], float], deadline_s: float) -> None:
        super().__init__(name="farflung-communication", daemon=True)
        self._session, self._read_clock, self._deadline_s = session, read_clock, deadline_s
        self._ready: deque[Callable[[], None]] = deque()
        self._is_sleeping = False
        self._is_stopping = False
        self._tracked: set[Pending[Any]] = set()
        self._end_error: RunLost | None = None
        self._total_cpu_s: float | None = None
        self._wakeup_send, self._wakeup_recv = socket.socketpair()
        self._wakeup_recv.setblocking(False)
        session.transport.loop.watch(self._wakeup_recv.fileno(), readable=self._drain_wakeup)

    @property
    def cpu_s(self) -> float:
        """Processor seconds of the thread so far."""
        if self._total_cpu_s is not None:
            return self._total_cpu_s
        assert self.ident is not None
        return time.clock_gettime(time.pthread_getcpuclockid(self.ident))

    def call_soon(self, fn: Callable[[], None]) -> None:
        """Calls ``fn`` on this thread; usable from any thread."""
        self._ready.append(fn)
        if self._is_sleeping:
            self._is_sleeping = False  # one byte wakes it; handlers on this thread must not fill the socket
            self._wakeup_send.send(b"!")

    def call_at(self, t: float, fn: Callable[[], None]) -> None:
        """Calls ``fn`` when the clock reaches ``t``; usable from this thread only."""
        self._session.transport.loop.call_later(t - self._read_clock(), fn)

    def launch(self, coroutine: Coroutine[Pending[Any], None, T]) -> Pending[T]:
        """Runs a coroutine here; usable from any thread. It fails if this thread has ended or ends before."""
        task = Task(coroutine, self.call_soon)
        self.track(task)
        if self._end_error is not None:
            coroutine.close()
        return task

    def track(self, pending: Pending[T]) -> Pending[T]:
        """Returns a result that this thread is to complete; it fails if the thread has ended or ends before."""
        self._tracked.add(pending)
        pending.add_done_callback(self._tracked.discard)
        if self._end_error is not None:
            pending.set_exception(self._end_error)
        return pending

    def stop(self) -> None:
        """Ends the thread after its queued calls, and waits for the end."""

        def end() -> None:
            self._is_stopping = True

        self.call_soon(end)
        self.join()
        # Only now: `call_soon` may still send while the thread is past its last iteration.
        self._wakeup_send.close()
        self._wakeup_recv.close()

    @override
    def run(self) -> None:
        """Runs the loop; an error in it fails everything that waits."""
        try:
            while not self._is_stopping:
                while self._ready:
                    self._ready.popleft()()
                check_s = self._session.wait_monitor.check(self._deadline_s)
                self._is_sleeping = True
                # A callback queued before `_is_sleeping` was set has sent no wakeup: check again.
                is_due = self._ready or self._is_stopping
                remaining_s = None if check_s is None else max(0.0, check_s - self._read_clock())
                self._session.transport.poll(0.0 if is_due else remaining_s)
                self._is_sleeping = False
        except BaseException as error:
            failure = RunLost(f"the communication thread failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail_tracked(failure)
            self._session.mailbox.end(failure)
        finally:
            self._is_sleeping = False
            self._fail_tracked(RunLost(_LEFT_MESSAGE))
            self._session.close()
            self._total_cpu_s = time.thread_time()

    def _fail_tracked(self, error: RunLost) -> None:
        """Fails all tracked results, including those of later."""
        self._end_error = self._end_error or error
        for pending in list(self._tracked):
            pending.set_exception(self._end_error)

    def _drain_wakeup(self) -> None:
        self._wakeup_recv.recv(4096)
