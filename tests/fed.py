"""A stream that another thread feeds, for tests of what waits for data."""

from __future__ import annotations

import threading
from typing import cast

import torch

from farflung.tasks import Pending
from farflung.types import Arrivals, SampleIds, Samples, State, Stream, StreamContext


class Fed(Stream):
    """Holds what is put in, from any thread; a step takes all there is, up to ``most`` and once ``least`` are there.

    Args:
      least: samples without which no step begins.
      most: no step takes more.
      weight: of every step; ``None``: by its samples.
    """

    def __init__(self, least: int, most: int | None = None, weight: float | None = None) -> None:
        self._least, self._most, self._weight = least, most or least, weight
        self._changed = threading.Condition()
        self._held: list[int] = []
        self._chosen: tuple[int, int] | None = None
        self._wanted: tuple[int, Pending[None]] | None = None
        self._closed = False
        self.used: list[list[int]] = []
        """What each step has used."""

    def put(self, *ids: int) -> None:
        """Some samples arrive."""
        with self._changed:
            self._held += ids
            ready = self._ready()
        if ready is not None:
            ready.set_result(None)

    def fail(self, error: Exception) -> None:
        """The source is broken."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._wanted is not None, timeout=30)
            assert self._wanted is not None
            ready = self._wanted[1]
        ready.set_exception(error)

    def feed(self, size: int, chunks: list[int]) -> threading.Thread:
        """Puts in samples 0, 1, 2, ... of ``size``, in chunks, from a thread of its own; never more than 16 wait."""

        def run() -> None:
            number = 0
            for chunk in chunks:
                with self._changed:
                    self._changed.wait_for(lambda: len(self._held) < 16 or self._closed)
                self.put(*((number + i) % size for i in range(chunk)))
                number += chunk

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def _ready(self) -> Pending[None] | None:
        if self._wanted is None or len(self._held) < self._wanted[0]:
            return None
        ready, self._wanted = self._wanted[1], None
        return ready

    # --- a stream -----------------------------------------------------------------------------------------------

    def start(self, context: StreamContext) -> Samples:
        self._decide = context.decide
        return context.data

    def poll(self, time_s: float, step: int) -> Arrivals:
        del time_s
        with self._changed:
            count = self._least
            if len(self._held) >= count and self._least < self._most:
                if self._chosen is None or self._chosen[0] != step:
                    made = self._decide("taken", step, lambda: min(len(self._held), self._most))
                    self._chosen = step, cast("int", made.value)
                count = self._chosen[1]
            ready = None
            if len(self._held) < count:
                ready = Pending[None]()
                self._wanted = count, ready
                self._changed.notify_all()
            return Arrivals(torch.tensor(self._held, dtype=torch.int64), ready, count, self._weight)

    def commit(self, ids: SampleIds, *, step: int) -> None:
        del step
        with self._changed:
            for index in ids.tolist():
                self._held.remove(index)
            self._changed.notify_all()
        self.used.append(ids.tolist())

    def state_dict(self) -> State:
        return {"held": torch.tensor(self._held, dtype=torch.int64)}

    def load_state_dict(self, state: State) -> None:
        self._held = state["held"].tolist()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
