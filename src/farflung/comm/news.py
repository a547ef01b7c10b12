"""Tells of members one by one, whether somebody waits yet or not."""

from __future__ import annotations

from collections import deque

from farflung.tasks import Pending, done, failed

__all__ = ["News"]


class News:
    """Ranks of which one waiter is told, each once and in their order.

    Args:
      what: they have done, for messages.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._untold: deque[int] = deque()
        self._wait: Pending[int] | None = None
        self._ended: BaseException | None = None

    def tell(self, rank: int) -> None:
        """Something has happened to a rank."""
        wait, self._wait = self._wait, None
        if wait is None:
            self._untold.append(rank)
        else:
            wait.set(rank)

    def next(self) -> Pending[int]:
        """The next rank that nobody was told of."""
        if self._untold:
            return done(self._untold.popleft())
        if self._ended is not None:
            return failed(self._ended)
        if self._wait is not None:
            raise RuntimeError(f"two waits for {self._what}")
        self._wait = Pending()
        return self._wait

    def end(self, error: BaseException) -> None:
        """Nothing more will happen; what has can still be told."""
        self._ended = error
        wait, self._wait = self._wait, None
        if wait is not None:
            wait.fail(error)
