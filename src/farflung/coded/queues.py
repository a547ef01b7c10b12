"""Queues between the thread that carries messages and the coroutines that wait for them."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

from typing_extensions import override

from farflung.coded.messages import End, Multiply
from farflung.errors import FarflungError
from farflung.tasks import Pending

__all__ = ["Queue", "Work"]

T = TypeVar("T")


class Queue(Generic[T]):
    """Takes items from one thread, for several coroutines of another.

    Each side keeps to single operations on the queue, and neither iterates over it.
    """

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._wait: Pending[None] | None = None

    def put(self, item: T) -> None:
        """Adds an item and ends the waits."""
        self._items.append(item)
        if self._wait is not None:
            self._wait.set(None)

    async def next(self) -> T:
        """Takes the first item; waits where there is none."""
        while not self._items:
            if self._wait is None or self._wait.done:
                self._wait = Pending()
            if self._items:
                break
            await self._wait
        return self._items.popleft()


class Work(Queue[Multiply | End | FarflungError]):
    """Products that are to be made, then the end or the error that ends them; rounds that are over are skipped."""

    def __init__(self) -> None:
        super().__init__()
        self._since = 0
        """The first round that is not over, by the last item."""
        self._ended = False

    @override
    def put(self, item: Multiply | End | FarflungError) -> None:
        if isinstance(item, Multiply):
            self._since = item.since
        else:
            self._ended = True
        super().put(item)

    @override
    async def next(self) -> Multiply | End | FarflungError:
        while True:
            item = await super().next()
            if not isinstance(item, Multiply) or not self.over(item.round):
                return item

    def over(self, round: int) -> bool:
        """Tells whether a round need not be carried on."""
        return self._ended or self._since > round
