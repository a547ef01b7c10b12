"""Event loop for sockets and timers."""

from __future__ import annotations

import heapq
import selectors
import time
from collections.abc import Callable

__all__ = ["EventLoop"]


class EventLoop:
    """Event loop of one thread: calls callbacks when a descriptor is ready or a time has come."""

    def __init__(self) -> None:
        self._selector = selectors.DefaultSelector()
        self._timers: list[tuple[float, int, Callable[[], object]]] = []
        self._order = 0

    def watch(
        self,
        fd: int,
        *,
        readable: Callable[[], object] | None = None,
        writable: Callable[[], object] | None = None,
    ) -> None:
        """Calls ``readable`` or ``writable`` whenever ``fd`` is; replaces earlier callbacks."""
        events = (selectors.EVENT_READ if readable else 0) | (selectors.EVENT_WRITE if writable else 0)
        registered = self._selector.get_map().get(fd)
        if not events:
            if registered is not None:
                self._selector.unregister(fd)
        elif registered is None:
            self._selector.register(fd, events, (readable, writable))
        else:
            self._selector.modify(fd, events, (readable, writable))

    def call_later(self, seconds: float, fn: Callable[[], object]) -> None:
        """Calls ``fn`` once after ``seconds``."""
        self._order += 1
        heapq.heappush(self._timers, (time.monotonic() + seconds, self._order, fn))

    def run_once(self, timeout_s: float | None) -> None:
        """Waits for an event, for at most ``timeout_s`` seconds, and runs the callbacks."""
        if self._timers:
            remaining_s = max(0.0, self._timers[0][0] - time.monotonic())
            timeout_s = remaining_s if timeout_s is None else min(timeout_s, remaining_s)
        for key, events in self._selector.select(timeout_s):
            readable, writable = key.data
            if readable is not None and events & selectors.EVENT_READ:
                readable()
            if writable is not None and events & selectors.EVENT_WRITE:
                writable()
        now_s = time.monotonic()  # what is scheduled from here on waits for the sockets
        while self._timers and self._timers[0][0] <= now_s:
            heapq.heappop(self._timers)[2]()

    def close(self) -> None:
        """Closes the selector and drops all timers."""
        self._selector.close()
        self._timers.clear()
