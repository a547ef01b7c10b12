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
from farflung.streams.buffer import with_buffer_options
from farflung.streams.live import CHUNK, LiveStream, MessageSource, PartitionRange, Records
from farflung.streams.messages import import_function

__all__ = ["SampleFactory", "iterator"]

SampleFactory: TypeAlias = Callable[[int, int, int], Iterable[tuple[int, tuple[Tensor, Tensor]]]]
"""Function of rank, size and first position that yields pairs of position and sample (inputs and targets)."""

MAX_POSITION = 1 << 47
"""Upper bound of positions, so that position and partition fit into an id of 64 bits."""


@with_buffer_options
def iterator(
    function: str | SampleFactory,
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

    def __init__(self, function: str | SampleFactory) -> None:
        self._factory = function
        self.name = f"iterator {function if isinstance(function, str) else getattr(function, '__qualname__', function)}"
        self._queue: Queue[tuple[int, Any]] = Queue(CHUNK)
        self._lock = Lock()
        self._num_yielded = 0
        self._blocked_s = 0.0
        """Seconds for which the iterator was not resumed because the queue was full."""
        self._blocked_since: float | None = None
        """Time since which the iterator has been suspended; ``None`` if it runs."""
        self._error: Exception | None = None
        self._is_closed = False
        self._next_position = 0

    @override
    def connect(self, rank: int, size: int) -> Mapping[int, PartitionRange]:
        self._function, self._rank, self._size = import_function("stream iterator", self._factory), rank, size
        return {0: PartitionRange(0, sys.maxsize, 0)}

    @override
    def start(self, positions: Mapping[int, int]) -> None:
        self._next_position = positions[0]
        Thread(target=self._run, args=(positions[0],), name="stream iterator", daemon=True).start()

    @override
    def read(self, max_messages: int, wait_s: float) -> list[Records]:
        samples: list[tuple[int, Any]] = []
        with suppress(Empty):
            while len(samples) < max_messages:
                samples.append(self._queue.get(timeout=wait_s) if not samples else self._queue.get_nowait())
        if not samples and self._error is not None and self._queue.empty():
            raise self._error
        for position, _ in samples:
            if not self._next_position <= position < MAX_POSITION:
                raise DataError(
                    f"{self.name}: position {position} where {self._next_position} or more must come: positions ascend"
                )
            self._next_position = position + 1
        return [Records(0, [s[0] for s in samples], [s[1] for s in samples])] if samples else []

    @override
    def count_received(self) -> Mapping[int, tuple[float, int]]:
        """Counts yielded samples; its clock stops while the iterator is suspended because the queue is full."""
        with self._lock:
            time_s = time.monotonic() if self._blocked_since is None else self._blocked_since
            return {0: (time_s - self._blocked_s, self._num_yielded)}

    @override
    def close(self) -> None:
        """Ends the thread when the iterator yields next."""
        self._is_closed = True
        with suppress(Empty):
            while True:
                self._queue.get_nowait()

    def _run(self, position: int) -> None:
        try:
            for at, sample in self._function(self._rank, self._size, position):
                with self._lock:
                    self._num_yielded += 1
                    self._blocked_since = time.monotonic()
                self._queue.put((operator.index(at), sample))
                with self._lock:
                    self._blocked_s += time.monotonic() - self._blocked_since
                    self._blocked_since = None
                if self._is_closed:
                    return
            self.trouble = "it has ended"
        except Exception as error:
            self._error = error
