"""Coroutines without an event loop of their own: :class:`Pending` results and the :class:`Task` that drives one.

The core is written as ``async def`` functions whose only suspension is ``await pending``. The runtime drives them: on
the wall clock a communication thread, in virtual time a heap. A driver hands each task a ``schedule`` function that
queues a callback to run later on the driver's own thread, so a task never runs on two.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Generic, TypeVar, cast

__all__ = ["Pending", "Task", "done", "failed", "first_of"]

T = TypeVar("T")


class Pending(Generic[T]):
    """A result that arrives later: await it in a coroutine, or :meth:`wait` for it on a thread.

    It completes once, by :meth:`set` or :meth:`fail`, from any thread; a second completion is ignored, so the
    first of several reasons to end a wait wins.
    """

    __slots__ = ("_callbacks", "_done", "_error", "_lock", "_value")

    def __init__(self) -> None:
        self._done = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._callbacks: list[Callable[[Pending[T]], None]] = []
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether a value or an error has arrived."""
        return self._done

    @property
    def error(self) -> BaseException | None:
        """The error it ended with, if it did."""
        return self._error

    def set(self, value: T) -> None:
        """Completes it with a value."""
        self._complete(value, None)

    def fail(self, error: BaseException) -> None:
        """Completes it with an error, raised where it is awaited."""
        self._complete(None, error)

    def follow(self, other: Pending[T]) -> None:
        """Completes as ``other`` does."""
        other.on_done(lambda _: self._complete(other._value, other._error))

    def _complete(self, value: T | None, error: BaseException | None) -> None:
        with self._lock:
            if self._done:
                return
            self._value, self._error, self._done = value, error, True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def on_done(self, callback: Callable[[Pending[T]], None]) -> None:
        """Calls ``callback(self)`` at completion, on the completing thread; at once if it is done."""
        with self._lock:
            if not self._done:
                self._callbacks.append(callback)
                return
        callback(self)

    def result(self) -> T:
        """The value, or the error raised.

        Raises:
          RuntimeError: it is not done yet.
        """
        if not self._done:
            raise RuntimeError("the result is not there yet")
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    def block(self) -> None:
        """Blocks the calling thread until it is done; every wait inside a runtime ends by its deadline."""
        if not self._done:
            # A bare lock: an Event takes the interpreter lock several times more on its way.
            arrived = threading.Lock()
            arrived.acquire()
            self.on_done(lambda _: arrived.release())
            arrived.acquire()

    def wait(self) -> T:
        """Blocks the calling thread until it is done; the value, or the error raised."""
        self.block()
        return self.result()

    def __await__(self) -> Generator[Pending[Any], None, T]:
        if not self._done:
            yield self
        return self.result()


def done(value: T) -> Pending[T]:
    """A pending result that is there already."""
    pending: Pending[T] = Pending()
    pending.set(value)
    return pending


def failed(error: BaseException) -> Pending[Any]:
    """A pending result that has failed already."""
    pending: Pending[Any] = Pending()
    pending.fail(error)
    return pending


class Task(Pending[T]):
    """A coroutine on its way; itself the pending result of what the coroutine returns.

    Args:
      coroutine: what to run; its only suspensions are awaited :class:`Pending` results.
      schedule: queues a callback on the driver's thread.
      at_once: whether to run up to the first suspension in place, on the driver's thread; otherwise the
        first step is scheduled too.
    """

    __slots__ = ("_coroutine", "_schedule")

    def __init__(
        self,
        coroutine: Coroutine[Pending[Any], None, T],
        schedule: Callable[[Callable[[], None]], None],
        *,
        at_once: bool = False,
    ) -> None:
        super().__init__()
        self._coroutine = coroutine
        self._schedule = schedule
        if at_once:
            self._step()
        else:
            schedule(self._step)

    def _step(self) -> None:
        if self._done:
            self._coroutine.close()
            return
        try:
            while True:
                awaited = self._coroutine.send(None)
                if not awaited.done:
                    awaited.on_done(self._resume)
                    return
        except StopIteration as stop:
            self.set(stop.value)
        except BaseException as error:
            self.fail(error)

    def drop(self) -> None:
        """Closes the coroutine of a task that nothing waits for any more."""
        self._coroutine.close()

    def _resume(self, _: Pending[Any]) -> None:
        self._schedule(self._step)


def first_of(pendings: Iterable[Pending[Any]]) -> Pending[int]:
    """The index of whichever completes first; ties go to the lowest index."""
    first: Pending[int] = Pending()
    for index, pending in enumerate(pendings):
        pending.on_done(lambda _, index=index: first.set(index))  # type: ignore[misc]
    return first
