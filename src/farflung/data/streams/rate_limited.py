"""Samples of a data set in memory, arriving at so many per second."""

from __future__ import annotations

from typing import Any, Literal

import torch

from farflung.data.streams.rates import Rates, courses
from farflung.errors import ConfigError
from farflung.files import deciding
from farflung.seeding import Passes, derive
from farflung.types import Arrivals, Batch, Dataset, Feed, Json, SampleIds, Samples, State

__all__ = ["RateLimited"]

_AHEAD = 1 << 24
"""Arrivals that a run which is replayed may have been ahead of this one."""


class RateLimited:
    r"""A data set as a source that sends ``rate`` samples per second, one at a time, in shuffled passes.

    Sample :math:`k`, counted from 1, of replica :math:`i` arrives :math:`k / S_i` seconds after the first step asks, or
    as late as a rate that changes says.
    Where all replicas draw from the whole data set they take turns: of each pass over it, replica :math:`i` of
    :math:`n` gets the positions :math:`i, i + n, i + 2n, \dots`; with shares, each has passes over its own.

    A step is made of the oldest samples. It waits until ``least`` are there and takes all that have arrived, up to
    ``most``. So it always takes as many as the run's batch where neither is given, and :math:`S_i` times the seconds
    of the last step where there is room between them. Its weight in the mean is its samples by those of the batch.

    What a step takes is a function of the seed, except where the number taken or dropped depends on the clock; that is
    a decision of the replica, which a replay makes again.

    Args:
      rate: :math:`S_i`, samples per second, above 0: one number, or one for each replica; pairs of a begin in seconds
        and a number in the place of a number are a rate that changes, counted from the first step of the run. A name
        draws each replica's from a law: ``"S1"``, ``"S2"``, ``"S1'"`` or ``"S2'"`` of Tyagi & Swany 2022, Table I, at
        least 8; ``"printed S1"`` is the list in their scripts.
      least: samples without which no step begins; the run's batch size when not given.
      most: of the samples there, no more than this; ``least`` when not given.
      backlog: how many samples may wait to be used; ``None``: any number.
      full: what becomes of a sample that arrives when as many do: with ``pause`` the source sends no more until a step
        has taken some, with ``drop_oldest`` the one that has waited longest is lost.

    Raises:
      ConfigError: a value out of its range.
    """

    everything = False

    def __init__(
        self,
        rate: Rates,
        least: int | None = None,
        most: int | None = None,
        backlog: int | None = None,
        full: Literal["pause", "drop_oldest"] = "pause",
    ) -> None:
        if not isinstance(rate, str):
            courses(rate, 1 if isinstance(rate, int | float) else len(rate), seed=0)
        self._rates = rate
        if full not in ("pause", "drop_oldest"):
            raise ConfigError(f"stream rate: full={full!r}: must be 'pause' or 'drop_oldest'")
        self._least, self._most, self._backlog, self._drops = least, most, backlog, full == "drop_oldest"
        self._held = torch.empty(0, dtype=torch.int64)
        self._next = 0
        self._in_use = 0
        self._begin: float | None = None
        """Since when the source sends without a pause."""
        self._before = 0.0
        """Seconds of its course that were over then."""
        self._elapsed = 0.0
        """Those that were over at the last poll."""
        self._sent = 0
        self._stalled = False
        self._dropped = 0
        """No arrival before this one is held, not even if it is still to come."""
        self._chosen: tuple[int, dict[str, int]] | None = None

    def open(self, feed: Feed) -> Samples:
        """Samples by the number of their arrival, counted from 0.

        Raises:
          ConfigError: rates for another number of replicas, or bounds that contradict each other.
        """
        self._course = courses(self._rates, feed.size, derive(feed.seed, "rates"))[feed.rank]
        self._fewest = feed.batch_size if self._least is None else self._least
        self._largest = self._fewest if self._most is None else self._most
        room = self._largest if self._backlog is None else self._backlog
        if not 1 <= self._fewest <= self._largest <= room:
            raise ConfigError(
                f"stream rate: least {self._fewest}, most {self._largest}, backlog {room}: must be 1 or more, and none "
                "above the next"
            )
        self._decide = feed.decide
        if feed.shared:
            return _InTurn(feed.data, Passes(derive(feed.seed, "stream")), feed.rank, feed.size)
        return _InTurn(feed.data, Passes(derive(feed.seed, "stream", feed.rank)), 0, 1)

    def poll(self, now: float, step: int) -> Arrivals:
        """All that is held, and whether there is enough of it."""
        self._arrive(now)
        wanted = self._wanted(step)
        missing = wanted - len(self._held)
        if missing > 0:
            unwanted = max(0, self._dropped - self._next)
            return Arrivals(self._held, self._arrival(self._sent + unwanted + missing))
        if not self._in_use:
            self._in_use = wanted
            if self._stalled:
                self._begin, self._before, self._sent = now, self._elapsed, 0
        return Arrivals(self._held, count=wanted)

    def commit(self, ids: SampleIds, *, step: int) -> None:
        """Takes samples out."""
        del step
        self._held = self._held[~torch.isin(self._held, ids)]
        self._in_use = 0

    def state_dict(self) -> State:
        """What is held, and which arrives next; the wait for that begins anew."""
        return {"held": self._held, "next": self._next, "dropped": self._dropped, "elapsed": self._elapsed}

    def seek(self, state: State) -> None:
        """Goes on from there."""
        self._held, self._next, self._dropped = state["held"], state["next"], state["dropped"]
        self._before = self._elapsed = float(state["elapsed"])
        self._begin, self._sent, self._in_use, self._chosen = None, 0, 0, None

    def close(self) -> None:
        """Nothing to end."""

    def _arrive(self, now: float) -> None:
        if self._begin is None:
            self._begin = now
        self._elapsed = self._before + (now - self._begin)
        due = int(self._course.sent(self._before, now - self._begin))
        while self._arrival(due + 1) <= now:
            due += 1
        while due > self._sent and self._arrival(due) > now:
            due -= 1
        new = due - self._sent
        if self._backlog is not None and not self._drops:
            room = max(0, self._backlog - (len(self._held) - self._in_use))
            self._stalled = new > room
            new = min(new, room)
        self._held = torch.cat([self._held, torch.arange(self._next, self._next + new)])
        self._held = self._held[self._held >= self._dropped]
        self._next += new
        self._sent += new

    def _arrival(self, number: int) -> float:
        assert self._begin is not None
        return self._begin + self._course.delay(number, self._before)

    def _wanted(self, step: int) -> int:
        """How many samples the step is made of, as far as that is known."""
        if self._fewest == self._largest and not (self._drops and self._backlog is not None):
            return self._fewest
        if self._chosen is None or self._chosen[0] != step:
            if len(self._held) < self._fewest:
                return self._fewest
            made = self._decide("arrivals", step, self._choice)
            with deciding("arrivals", step):
                self._chosen = step, self._possible(made.value)
            self._dropped = self._chosen[1]["oldest"]
            self._held = self._held[self._held >= self._dropped]
        return self._chosen[1]["count"]

    def _possible(self, choice: Any) -> dict[str, int]:
        """A choice as it was made or read.

        Raises:
          ValueError: it cannot have been made.
        """
        oldest, count = choice["oldest"], choice["count"]
        whole = type(oldest) is int and type(count) is int
        if not (whole and 0 <= oldest <= self._next + _AHEAD and self._fewest <= count <= self._largest):
            raise ValueError(f"oldest {oldest!r}, count {count!r}")
        return {"oldest": oldest, "count": count}

    def _choice(self) -> Json:
        kept = self._held if self._backlog is None else self._held[-self._backlog :]
        return {"oldest": int(kept[0]), "count": min(len(kept), self._largest)}


class _InTurn:
    """The samples of a data set in shuffled passes, of which every so-manyth is this replica's.

    Args:
      data: the whole.
      passes: their orders.
      first: position of this replica's first sample.
      stride: from one of its positions to the next.
    """

    def __init__(self, data: Dataset, passes: Passes, first: int, stride: int) -> None:
        self._data, self._passes, self._first, self._stride = data, passes, first, stride

    def rows(self, ids: SampleIds) -> Batch:
        n = len(self._data)
        positions = self._first + self._stride * ids
        found = torch.empty_like(positions)
        for index in torch.unique(positions // n).tolist():
            here = positions // n == index
            found[here] = self._passes.order(index, n)[positions[here] % n]
        return self._data.rows(found)

    def prepare(self, rows: Batch, *, train: bool) -> Batch:
        return self._data.prepare(rows, train=train)
