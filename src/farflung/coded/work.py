"""What a device was told to do and has not done yet."""

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
    """Takes from one thread what another, or several coroutines of one, wait for."""

    def __init__(self) -> None:
        self._items: deque[T] = deque()
        self._wait: Pending[None] | None = None

    def put(self, item: T) -> None:
        self._items.append(item)
        if self._wait is not None:
            self._wait.set(None)

    async def next(self) -> T:
        """The first of them; waits where there is none."""
        while not self._items:
            if self._wait is None or self._wait.done:
                self._wait = Pending()
            if self._items:
                break
            await self._wait
        return self._items.popleft()


class Work(Queue[Multiply | End | FarflungError]):
    """Products that are to be made, then the end or what has ended it all; rounds that are over are not kept."""

    @override
    def put(self, item: Multiply | End | FarflungError) -> None:
        if isinstance(item, Multiply):
            kept = [one for one in self._items if not isinstance(one, Multiply) or one.round >= item.since]
            if len(kept) < len(self._items):
                self._items = deque(kept)
        super().put(item)

    def over(self, round: int) -> bool:
        """Whether a round need not be carried on."""
        return any(not isinstance(one, Multiply) or one.since > round for one in self._items)
