"""Samples from an iterator of the user's own."""

from __future__ import annotations

import operator
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from queue import Empty, Queue
from threading import Lock, Thread
from typing import Any, TypeAlias

from torch import Tensor
from typing_extensions import override

from farflung.errors import DataError
from farflung.streams.buffer import buffered
from farflung.streams.live import CHUNK, LiveStream, MessageSource, Reach, Records
from farflung.streams.messages import function_named

__all__ = ["Factory", "iterator"]

Factory: TypeAlias = Callable[[int, int, int], Iterable[tuple[int, tuple[Tensor, Tensor]]]]
"""Called with rank, size and the position to begin at; yields position, and inputs and targets of one sample."""

END = 1 << 47
"""No position reaches this: with its partition each is an id of 64 bits."""


@buffered
def iterator(
    function: str | Factory,
    skip: int = 0,
    deadline_s: float = 60.0,
    **buffer: Any,
) -> LiveStream:
    """Samples from an iterator of your own.

    ``function(rank, size, position)`` yields ``(position, (inputs, targets))`` for each sample of that replica, from
    the first one at or behind ``position`` on. Positions are whole numbers from 0 that ascend. A resumed run calls it
    with the position of the oldest sample that was held, so it has to find the same samples there. It runs in a thread
    of its own and may block until a sample arrives.

    Args:
      function: the function itself, or ``module:function``.
      skip: samples of another shape or type than the workload's that may be skipped; one more ends the run.
      deadline_s: how long a step waits while nothing comes.
      buffer: how what has arrived is kept; see :class:`Buffer`. The backlog is 65,536 samples when not given.

    Raises:
      ConfigError: a value out of its range.
    """
    return LiveStream(IteratorSource(function), lambda sample: sample, skip, deadline_s, buffer)


class IteratorSource(MessageSource):
    """Runs an iterator in a thread of its own; see :func:`iterator`.

    So an iterator that blocks delays neither the deadline nor the end of the run.
    """

    def __init__(self, function: str | Factory) -> None:
        self._given = function
        self.name = f"iterator {function if isinstance(function, str) else getattr(function, '__qualname__', function)}"
        self._queue: Queue[tuple[int, Any]] = Queue(CHUNK)
        self._counting = Lock()
        self._yielded = 0
        self._held_s = 0.0
        """For how long the iterator was not resumed for want of room."""
        self._held_at: float | None = None
        """Since when it is not."""
        self._error: Exception | None = None
        self._closed = False
        self._following = 0

    @override
    def open(self, rank: int, size: int) -> Mapping[int, Reach]:
        self._function, self._rank, self._size = function_named("stream iterator", self._given), rank, size
        return {0: Reach(0, sys.maxsize, 0)}

    @override
    def start(self, positions: Mapping[int, int]) -> None:
        self._following = positions[0]
        Thread(target=self._run, args=(positions[0],), name="stream iterator", daemon=True).start()

    @override
    def read(self, most: int, wait_s: float) -> list[Records]:
        came: list[tuple[int, Any]] = []
        with suppress(Empty):
            while len(came) < most:
                came.append(self._queue.get(timeout=wait_s) if not came else self._queue.get_nowait())
        if not came and self._error is not None and self._queue.empty():
            raise self._error
        for position, _ in came:
            if not self._following <= position < END:
                raise DataError(
                    f"{self.name}: position {position} where {self._following} or more must come: positions ascend"
                )
            self._following = position + 1
        return [Records(0, [one[0] for one in came], [one[1] for one in came])] if came else []

    @override
    def grown(self) -> Mapping[int, tuple[float, int]]:
        """Counts what has been yielded; its clock stands still while the iterator is not resumed for want of room."""
        with self._counting:
            now = time.monotonic() if self._held_at is None else self._held_at
            return {0: (now - self._held_s, self._yielded)}

    @override
    def close(self) -> None:
        """Ends the thread when the iterator yields next."""
        self._closed = True
        with suppress(Empty):
            while True:
                self._queue.get_nowait()

    def _run(self, position: int) -> None:
        try:
            for at, sample in self._function(self._rank, self._size, position):
                with self._counting:
                    self._yielded += 1
                    self._held_at = time.monotonic()
                self._queue.put((operator.index(at), sample))
                with self._counting:
                    self._held_s += time.monotonic() - self._held_at
                    self._held_at = None
                if self._closed:
                    return
            self.trouble = "it has ended"
        except Exception as error:
            self._error = error
