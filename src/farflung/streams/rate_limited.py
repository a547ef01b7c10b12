"""Stream of a data set at a given number of samples per second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from farflung.seeding import Passes, derive
from farflung.streams.buffer import Buffer, buffered
from farflung.streams.rates import Rates, courses
from farflung.types import Arrivals, Batch, Dataset, Feed, SampleIds, Samples, State, Stream

__all__ = ["RateLimited"]


@buffered
class RateLimited(Stream):
    r"""Stream of a data set that sends ``rate`` samples per second, one at a time, in shuffled passes.

    Sample :math:`k`, counted from 1, of replica :math:`i` arrives :math:`k / S_i` seconds after the first step asks; a
    changing rate is integrated. Replicas with a common data set take turns: of each pass, replica :math:`i` of
    :math:`n` gets the positions :math:`i, i + n, i + 2n, \dots`.

    Args:
      rate: :math:`S_i` in samples per second, above 0: one number, or one for each replica. Pairs of a begin in
        seconds and a number, in place of a number, describe a changing rate from the first step of the run. ``"S1"``,
        ``"S2"``, ``"S1'"`` or ``"S2'"`` draws each replica's rate from a distribution of Tyagi & Swany 2022, Table I,
        at least 8; ``"trace FILE"`` reads the pairs from a CSV file.
      buffer: Options of :class:`Buffer`.

    Raises:
      ConfigError: A value is out of range.
      DataError: The trace cannot be read.
    """

    def __init__(self, rate: Rates, **buffer: Any) -> None:
        num_rates = 1 if isinstance(rate, int | float | str) else len(rate)
        courses(rate, num_rates, seed=0)
        self._rates = rate
        self._buffer = Buffer(**buffer)
        self._next = 0
        self._begin: float | None = None
        """Time since which the source has sent without a pause."""
        self._before = 0.0
        """Elapsed seconds of the rate's course at that time."""
        self._elapsed = 0.0
        """Elapsed seconds of the course at the last poll."""
        self._sent = 0
        self._stalled = False

    @override
    def open(self, feed: Feed) -> Samples:
        rates = courses(self._rates, feed.size, derive(feed.seed, "rates"))
        self._course = rates[feed.rank]
        self._buffer.open(feed, rate=self._course.constant)
        for course in rates:
            if course.constant is not None:
                self._buffer.check_rate(course.constant)
        if feed.shared:
            return _InTurn(feed.data, Passes(derive(feed.seed, "stream")), feed.rank, feed.size)
        return _InTurn(feed.data, Passes(derive(feed.seed, "stream", feed.rank)), 0, 1)

    @override
    def poll(self, now: float, step: int) -> Arrivals:
        self._arrive(now)
        is_first_poll = not self._buffer.in_use
        missing, arrivals = self._buffer.poll(step, lambda: self._course.at(self._elapsed))
        if missing:
            unwanted = max(0, self._buffer.oldest() - self._next)
            return replace(arrivals, ready=self._arrival(self._sent + unwanted + missing))
        if is_first_poll and self._stalled:
            self._begin, self._before, self._sent = now, self._elapsed, 0
        return arrivals

    @override
    def commit(self, ids: SampleIds, *, step: int) -> None:
        del step
        self._buffer.commit(ids)

    @override
    def state_dict(self) -> State:
        return {"buffer": self._buffer.state_dict(), "next": self._next, "elapsed": self._elapsed}

    @override
    def seek(self, state: State) -> None:
        self._buffer.seek(state["buffer"])
        self._next = int(state["next"])
        self._before = self._elapsed = float(state["elapsed"])
        self._begin, self._sent = None, 0

    def _arrive(self, now: float) -> None:
        if self._begin is None:
            self._begin = now
        self._elapsed = self._before + (now - self._begin)
        num_due = int(self._course.sent(self._before, now - self._begin))
        while self._arrival(num_due + 1) <= now:
            num_due += 1
        while num_due > self._sent and self._arrival(num_due) > now:
            num_due -= 1
        num_new, room = num_due - self._sent, self._buffer.room
        self._stalled = room is not None and num_new > room
        if room is not None:
            num_new = min(num_new, room)
        self._buffer.put(torch.arange(self._next, self._next + num_new))
        self._next += num_new
        self._sent += num_new

    def _arrival(self, number: int) -> float:
        assert self._begin is not None
        return self._begin + self._course.delay(number, self._before)


class _InTurn:
    """Samples of a data set by the number of their arrival, from 0, in endless shuffled passes.

    Args:
      data: Data set.
      passes: Orders of the passes.
      first: Position of this replica's first sample.
      stride: Distance between two of its positions.
    """

    def __init__(self, data: Dataset, passes: Passes, first: int, stride: int) -> None:
        self._data, self._passes, self._first, self._stride = data, passes, first, stride

    def rows(self, ids: SampleIds) -> Batch:
        n = len(self._data)
        positions = self._first + self._stride * ids
        indices = torch.empty_like(positions)
        for index in torch.unique(positions // n).tolist():
            mask = positions // n == index
            indices[mask] = self._passes.order(index, n)[positions[mask] % n]
        return self._data.rows(indices)

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        return self._data.prepare(rows, train=train)
