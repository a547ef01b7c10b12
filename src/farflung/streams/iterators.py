"""Stream of samples from a user's iterator."""

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
"""Function of rank, size and first position that yields pairs of position and sample (inputs and targets)."""

END = 1 << 47
"""Upper bound of positions, so that position and partition fit into an id of 64 bits."""


@buffered
def iterator(
    function: str | Factory,
    skip: int = 0,
    deadline_s: float = 60.0,
    **buffer: Any,
) -> LiveStream:
    """Streams samples from a user's iterator.

    ``function(rank, size, position)`` yields ``(position, (inputs, targets))`` for each sample of that replica, from
    the first one at or after ``position``. Positions are ascending whole numbers from 0. A resumed run calls it with
    the position of the oldest sample that was held, so it has to return the same samples again. It runs in a thread of
    its own and may block until a sample arrives.

    Args:
      function: Function, or its name as ``module:function``.
      skip: Number of samples with another shape or type than the workload's that may be skipped; one more ends the
        run.
      deadline_s: Maximum time in seconds that a step waits without a new sample.
      buffer: Options of :class:`Buffer`. The default backlog is 65,536 samples.

    Raises:
      ConfigError: A value is out of range.
    """
    return LiveStream(IteratorSource(function), lambda sample: sample, skip, deadline_s, buffer)


class IteratorSource(MessageSource):
    """Source that runs an iterator in a thread of its own; see :func:`iterator`.

    A blocking iterator therefore delays neither the deadline nor the end of the run.
    """

    def __init__(self, function: str | Factory) -> None:
        self._given = function
        self.name = f"iterator {function if isinstance(function, str) else getattr(function, '__qualname__', function)}"
        self._queue: Queue[tuple[int, Any]] = Queue(CHUNK)
        self._counting = Lock()
        self._yielded = 0
        self._held_s = 0.0
        """Seconds for which the iterator was not resumed because the queue was full."""
        self._held_at: float | None = None
        """Time since which the iterator has been suspended; ``None`` if it runs."""
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
        samples: list[tuple[int, Any]] = []
        with suppress(Empty):
            while len(samples) < most:
                samples.append(self._queue.get(timeout=wait_s) if not samples else self._queue.get_nowait())
        if not samples and self._error is not None and self._queue.empty():
            raise self._error
        for position, _ in samples:
            if not self._following <= position < END:
                raise DataError(
                    f"{self.name}: position {position} where {self._following} or more must come: positions ascend"
                )
            self._following = position + 1
        return [Records(0, [s[0] for s in samples], [s[1] for s in samples])] if samples else []

    @override
    def grown(self) -> Mapping[int, tuple[float, int]]:
        """Counts yielded samples; its clock stops while the iterator is suspended because the queue is full."""
        with self._counting:
            time_s = time.monotonic() if self._held_at is None else self._held_at
            return {0: (time_s - self._held_s, self._yielded)}

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
