"""Keeps background transfers off the link while a step waits for its exchanges."""

from __future__ import annotations

from collections.abc import Callable

from farflung.tasks import Pending
from farflung.types import Runtime

__all__ = ["LinkGate"]


class LinkGate:
    """Shut from the first launch of exchanges that a step waits for until they are merged; see
    :class:`farflung.types.Gate`.

    The thread that trains shuts and opens it; what waits for it runs where exchanges do. There, what saw it open sends
    before exchanges that were launched afterwards begin, since each runs undisturbed up to its next wait.

    Args:
      runtime: the world.
      under_way: whether exchanges are.
      overlaps: whether some of them go on beside computing.
    """

    def __init__(self, runtime: Runtime, under_way: Callable[[], bool], *, overlaps: bool) -> None:
        self._runtime, self._under_way, self._overlaps = runtime, under_way, overlaps
        self._opens: Pending[None] | None = None
        """Done when it opens; ``None`` while it is open."""

    def now(self) -> float:
        return self._runtime.now()

    def shut(self) -> None:
        """Nothing sets out any more."""
        if self._opens is None:
            self._opens = Pending()

    def open(self) -> None:
        """Opens the gate to all waits."""
        opens, self._opens = self._opens, None
        if opens is not None:
            opens.set(None)

    async def opened(self, rest_s: float = 0.0) -> float:
        """Rests where exchanges are under way that no step waits for, then waits until it is open."""
        if rest_s and self._overlaps and self._under_way():
            await self._runtime.sleep_until(self.now() + rest_s)
        # It may have been shut again since the wait was over.
        while (opens := self._opens) is not None:
            await opens
        return self.now()
