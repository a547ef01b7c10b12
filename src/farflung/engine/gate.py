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

    def __init__(self, runtime: Runtime, under_way: Callable[[], bool], *, overlaps: bool) -> None:
        self._runtime, self._under_way, self._overlaps = runtime, under_way, overlaps
        self._opens: Pending[None] | None = None
        """Pending that completes when the gate opens; ``None`` while it is open."""

    def now(self) -> float:
        return self._runtime.now()

    def shut(self) -> None:
        """Blocks background transfers until :meth:`release`."""
        if self._opens is None:
            self._opens = Pending()

    def open(self) -> None:
        """Releases all waits."""
        opens, self._opens = self._opens, None
        if opens is not None:
            opens.set(None)

    async def opened(self, rest_s: float = 0.0) -> float:
        """Stays idle first if exchanges are in flight that no step waits for, then waits until the gate is open."""
        if rest_s and self._overlaps and self._under_way():
            await self._runtime.sleep_until(self.now() + rest_s)
        # It may have been shut again since the wait was over.
        while (opens := self._opens) is not None:
            await opens
        return self.now()
