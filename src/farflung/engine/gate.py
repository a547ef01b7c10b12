"""Gate that blocks background transfers while a step waits for its exchanges."""

from __future__ import annotations

from collections.abc import Callable

from farflung.tasks import Pending
from farflung.types import Runtime

__all__ = ["LinkGate"]


class LinkGate:
    """Gate that is closed from the first launch of exchanges that a step waits for until they are merged; see
    :class:`farflung.types.Gate`.

    The training thread closes and releases it. Waiters run on the communication thread. A waiter that saw it open sends
    before exchanges that are launched afterwards begin, since each runs without interruption up to its next await.

    Args:
      runtime: Runtime of this replica.
      is_busy: Function that returns True while exchanges are in flight.
      has_overlap: True if some exchanges overlap with computing.
    """

    def __init__(self, runtime: Runtime, is_busy: Callable[[], bool], *, has_overlap: bool) -> None:
        self._runtime, self._is_busy, self._has_overlap = runtime, is_busy, has_overlap
        self._opening: Pending[None] | None = None
        """Pending that completes when the gate opens; ``None`` while it is open."""

    def read_clock(self) -> float:
        return self._runtime.read_clock()

    def close(self) -> None:
        """Blocks background transfers until :meth:`release`."""
        if self._opening is None:
            self._opening = Pending()

    def release(self) -> None:
        """Releases all waits."""
        opens, self._opening = self._opening, None
        if opens is not None:
            opens.set_result(None)

    async def wait_open(self, idle_s: float = 0.0) -> float:
        """Stays idle first if exchanges are in flight that no step waits for, then waits until the gate is open."""
        if idle_s and self._has_overlap and self._is_busy():
            await self._runtime.sleep_until(self.read_clock() + idle_s)
        # It may have been shut again since the wait was over.
        while (opens := self._opening) is not None:
            await opens
        return self.read_clock()
