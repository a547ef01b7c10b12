"""Coroutines without an event loop: :class:`Pending` results, and a :class:`Task` for each running coroutine.

The core consists of ``async def`` functions whose only suspension is ``await pending``. A runtime drives them: a
communication thread on the wall clock, an event heap in virtual time. It passes each task a ``schedule`` function that
queues callbacks for the driver's own thread, so a task never runs on two threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Coroutine, Generator, Iterable
from typing import Any, Generic, TypeVar, cast

__all__ = ["Pending", "Task", "create_completed", "create_failed", "wait_any"]

T = TypeVar("T")


class Pending(Generic[T]):
    """Future result: awaited in a coroutine, or by :meth:`wait` on a thread.

    It completes once, by :meth:`set_result` or :meth:`set_exception`, from any thread. Later completions are ignored,
    so the first of several reasons to end a wait wins.
    """

    __slots__ = ("_callbacks", "_lock", "_value", "error", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        """True if a value or an error has been set."""
        self.error: BaseException | None = None
        """Error that was set, if any."""
        self._value: T | None = None
        self._callbacks: list[Callable[[Pending[T]], None]] = []
        self._lock = threading.Lock()

    def set_result(self, value: T) -> None:
        """Completes this result with a value."""
        self._complete(value, None)

    def set_exception(self, error: BaseException) -> None:
        """Completes this result with an error, which awaiting it raises."""
        self._complete(None, error)

    def follow(self, source: Pending[T]) -> None:
        """Completes this result once ``source`` completes, with the same value or error."""
        source.add_done_callback(lambda _: self._complete(source._value, source.error))

    def _complete(self, value: T | None, error: BaseException | None) -> None:
        with self._lock:
            if self.is_done:
                return
            self._value, self.error, self.is_done = value, error, True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)

    def add_done_callback(self, callback: Callable[[Pending[T]], None]) -> None:
        """Calls ``callback(self)`` at completion on the completing thread, or immediately if done."""
        with self._lock:
            if not self.is_done:
                self._callbacks.append(callback)
                return
        callback(self)

    def result(self) -> T:
        """Returns the value, or raises the error.

        Raises:
          RuntimeError: The result is not done.
        """
        if not self.is_done:
            raise RuntimeError("the result is not there yet")
        if self.error is not None:
            raise self.error
        return cast(T, self._value)

    def wait_until_done(self) -> None:
        """Blocks the calling thread until done; every wait inside a runtime ends by its deadline."""
        if not self.is_done:
            # Uses a plain lock, since an Event acquires the interpreter lock several times more.
            completion = threading.Lock()
            completion.acquire()
            self.add_done_callback(lambda _: completion.release())
            completion.acquire()

    def wait(self) -> T:
        """Blocks the calling thread until done; returns the value or raises the error."""
        self.wait_until_done()
        return self.result()

    def __await__(self) -> Generator[Pending[Any], None, T]:
        if not self.is_done:
            yield self
        return self.result()


def create_completed(value: T) -> Pending[T]:
    """Creates a result that has completed with a value."""
    pending: Pending[T] = Pending()
    pending.set_result(value)
    return pending


def create_failed(error: BaseException) -> Pending[Any]:
    """Creates a result that has completed with an error."""
    pending: Pending[Any] = Pending()
    pending.set_exception(error)
    return pending


class Task(Pending[T]):
    """Running coroutine, and the pending result of its return value.

    Args:
      coroutine: Coroutine to run, whose only suspensions are awaited :class:`Pending` results.
      schedule: Function that queues a callback on the driver's thread.
      eager_start: True to run up to the first suspension immediately, on the driver's thread; otherwise the first step
        is scheduled too.
    """

    __slots__ = ("_coroutine", "_schedule")

    def __init__(
        self,
        coroutine: Coroutine[Pending[Any], None, T],
        schedule: Callable[[Callable[[], None]], None],
        *,
        eager_start: bool = False,
    ) -> None:
        super().__init__()
        self._coroutine = coroutine
        self._schedule = schedule
        if eager_start:
            self._step()
        else:
            schedule(self._step)

    def _step(self) -> None:
        if self.is_done:
            self._coroutine.close()
            return
        try:
            while True:
                dependency = self._coroutine.send(None)
                if not dependency.is_done:
                    dependency.add_done_callback(self._resume)
                    return
        except StopIteration as stop:
            self.set_result(stop.value)
        except BaseException as error:
            self.set_exception(error)

    def close(self) -> None:
        """Closes the coroutine of a task that nothing awaits any more."""
        self._coroutine.close()

    def _resume(self, _: Pending[Any]) -> None:
        self._schedule(self._step)


def wait_any(pendings: Iterable[Pending[Any]]) -> Pending[int]:
    """Returns the pending index of the result that completes first; ties go to the lowest index."""
    first: Pending[int] = Pending()
    for index, pending in enumerate(pendings):
        pending.add_done_callback(lambda _, index=index: first.set_result(index))  # type: ignore[misc]
    return first
