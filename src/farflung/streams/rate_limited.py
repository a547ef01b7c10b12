"""Stream of a data set at a given number of samples per second."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from typing_extensions import override

from farflung.seeding import ShuffledPasses, derive_seed
from farflung.streams.buffer import Buffer, with_buffer_options
from farflung.streams.rates import Rates, build_courses
from farflung.types import Arrivals, Batch, Dataset, SampleIds, Samples, State, Stream, StreamContext

__all__ = ["RateLimited"]


@with_buffer_options
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
        build_courses(rate, num_rates, seed=0)
        self._rates = rate
        self._buffer = Buffer(**buffer)
        self._next_id = 0
        self._begin_s: float | None = None
        """Time since which the source has sent without a pause."""
        self._elapsed_before_s = 0.0
        """Elapsed seconds of the rate's course at that time."""
        self._elapsed_s = 0.0
        """Elapsed seconds of the course at the last poll."""
        self._num_sent = 0
        self._is_stalled = False

    @override
    def start(self, context: StreamContext) -> Samples:
        rates = build_courses(self._rates, context.size, derive_seed(context.seed, "rates"))
        self._course = rates[context.rank]
        self._buffer.prepare(context, rate=self._course.constant_rate)
        for course in rates:
            if course.constant_rate is not None:
                self._buffer.check_rate(course.constant_rate)
        if context.is_shared:
            return _ShuffledSamples(
                context.data, ShuffledPasses(derive_seed(context.seed, "stream")), context.rank, context.size
            )
        return _ShuffledSamples(
            context.data, ShuffledPasses(derive_seed(context.seed, "stream", context.rank)), 0, 1
        )

    @override
    def poll(self, time_s: float, step: int) -> Arrivals:
        self._add_arrived(time_s)
        is_first_poll = not self._buffer.num_in_use
        missing, arrivals = self._buffer.poll(step, lambda: self._course.get_rate(self._elapsed_s))
        if missing:
            unwanted = max(0, self._buffer.get_oldest() - self._next_id)
            return replace(arrivals, next_poll=self._compute_arrival(self._num_sent + unwanted + missing))
        if is_first_poll and self._is_stalled:
            self._begin_s, self._elapsed_before_s, self._num_sent = time_s, self._elapsed_s, 0
        return arrivals

    @override
    def commit(self, ids: SampleIds, *, step: int) -> None:
        del step
        self._buffer.commit(ids)

    @override
    def state_dict(self) -> State:
        return {"buffer": self._buffer.state_dict(), "next": self._next_id, "elapsed": self._elapsed_s}

    @override
    def load_state_dict(self, state: State) -> None:
        self._buffer.load_state_dict(state["buffer"])
        self._next_id = int(state["next"])
        self._elapsed_before_s = self._elapsed_s = float(state["elapsed"])
        self._begin_s, self._num_sent = None, 0

    def _add_arrived(self, time_s: float) -> None:
        if self._begin_s is None:
            self._begin_s = time_s
        self._elapsed_s = self._elapsed_before_s + (time_s - self._begin_s)
        num_due = int(self._course.count_sent(self._elapsed_before_s, time_s - self._begin_s))
        while self._compute_arrival(num_due + 1) <= time_s:
            num_due += 1
        while num_due > self._num_sent and self._compute_arrival(num_due) > time_s:
            num_due -= 1
        num_new, room = num_due - self._num_sent, self._buffer.room
        self._is_stalled = room is not None and num_new > room
        if room is not None:
            num_new = min(num_new, room)
        self._buffer.add_arrivals(torch.arange(self._next_id, self._next_id + num_new))
        self._next_id += num_new
        self._num_sent += num_new

    def _compute_arrival(self, number: int) -> float:
        assert self._begin_s is not None
        return self._begin_s + self._course.compute_delay(number, self._elapsed_before_s)


class _ShuffledSamples:
    """Samples of a data set by the number of their arrival, from 0, in endless shuffled passes.

    Args:
      data: Data set.
      passes: Orders of the passes.
      first: Position of this replica's first sample.
      stride: Distance between two of its positions.
    """

    def __init__(self, data: Dataset, passes: ShuffledPasses, first: int, stride: int) -> None:
        self._data, self._passes, self._first, self._stride = data, passes, first, stride

    def get_rows(self, ids: SampleIds) -> Batch:
        n = len(self._data)
        positions = self._first + self._stride * ids
        indices = torch.empty_like(positions)
        for index in torch.unique(positions // n).tolist():
            mask = positions // n == index
            indices[mask] = self._passes.get_order(index, n)[positions[mask] % n]
        return self._data.get_rows(indices)

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        return self._data.prepare(rows, train=train)
