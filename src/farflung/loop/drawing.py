"""The samples of a replica's steps: picked, lent, made ready, used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose
from farflung.loop.members import Parts
from farflung.seeding import RandomState
from farflung.types import (
    Batch,
    Json,
    PoolView,
    Runtime,
    SampleIds,
    Samples,
    State,
)

__all__ = ["Drawing"]


@dataclass(frozen=True, slots=True)
class _Drawn:
    """The samples of a step, from when they are picked until their gradient is given.

    Args:
      ids: which.
      weights: of each, for importance; ``None``: all weigh 1.
      weight: of the step in the mean; ``None``: by the number of samples.
      told: what telemetry says of the stream and the sampler.
      pool: what they were picked from; see :class:`farflung.types.PoolView`.
    """

    ids: SampleIds
    weights: Tensor | None
    weight: float | None
    told: Mapping[str, Json]
    pool: int | SampleIds

    def state_dict(self) -> State:
        weights = {} if self.weights is None else {"weights": self.weights}
        drawn = {"ids": self.ids, **weights}
        return {**drawn, "weight": self.weight, "told": dict(self.told), "pool": self.pool}

    @staticmethod
    def from_state(state: State) -> _Drawn:
        return _Drawn(state["ids"], state.get("weights"), state["weight"], state["told"], state["pool"])


@dataclass(slots=True)
class Drawing:
    """What a replica's steps train on.

    Args:
      runtime: the world.
      parts: stream, sampler and sharing are used.
      source: the rows of samples, and how they are made ready.
      count: how many samples there are where all are at hand.
      share: where this replica draws from samples of its own alone, their number over the mean of all replicas.
      batch_size: of a step, where the stream says no other.
      random: installed whenever something is drawn that is this replica's own.
    """

    runtime: Runtime
    parts: Parts
    source: Samples
    count: int
    share: float | None
    batch_size: int
    random: RandomState
    sent_nbytes: int = field(init=False, default=0)
    """Bytes of samples that were lent."""
    _drawn: _Drawn | None = field(init=False, default=None)

    async def batch(self, step: int) -> tuple[Batch, Tensor | None]:
        """A step's samples, waited for where a stream is slow, and their importance weights.

        They are the same until :meth:`commit`, so a step that is broken off before loses none.
        """
        await self.pick(step)
        assert self._drawn is not None
        self.random.install()
        rows = self.source.rows(self._drawn.ids)
        if self.parts.sharing.due(step):
            rows = await self._shared(rows, step)
            self.random.install()
        batch = self.source.prepare(rows, train=True)
        weights = self._drawn.weights
        if weights is not None and len(weights) < len(batch):
            weights = torch.cat([weights, weights.new_ones(len(batch) - len(weights))])
        return batch, weights

    async def pick(self, step: int) -> int:
        """Picks a step's samples, where that has not been done, and returns their number."""
        if self._drawn is None:
            self._drawn = await self._draw(step)
        return len(self._drawn.ids)

    @property
    def is_weighted(self) -> bool:
        """Whether the step's samples have importance weights."""
        return self._drawn is not None and self._drawn.weights is not None

    def view_of_rest(self, step: int) -> PoolView:
        """What a step could have drawn and has not."""
        assert self._drawn is not None
        pool, used = self._drawn.pool, self._drawn.ids
        rest = pool if isinstance(pool, int) else pool[~torch.isin(pool, used)]
        return self._view(step, rest, len(used))

    def weight(self, samples: int) -> float:
        """Of the step in the mean, where so many samples make it up."""
        assert self._drawn is not None
        return samples / self.batch_size if self._drawn.weight is None else self._drawn.weight

    def commit(self, step: int) -> Mapping[str, Json]:
        """The gradient of the step's samples is given: they are used. What telemetry says of how they were drawn."""
        assert self._drawn is not None
        drawn, self._drawn = self._drawn, None
        used = drawn.ids.unique() if self.parts.sampler.needs_scores else drawn.ids
        self.parts.stream.commit(used, step=step)
        return drawn.told

    def state_dict(self) -> State:
        """What the step under way has drawn; empty between steps."""
        return {} if self._drawn is None else self._drawn.state_dict()

    def load_state_dict(self, drawn: State, sent_nbytes: int) -> None:
        """Continues from :meth:`state_dict`, with as many bytes sent."""
        self._drawn = _Drawn.from_state(drawn) if drawn else None
        self.sent_nbytes = sent_nbytes

    async def _draw(self, step: int) -> _Drawn:
        stream, sampler = self.parts.stream, self.parts.sampler
        if self.runtime.elastic is not None:
            self.runtime.elastic.give_back(step, sampler)
        arrivals = stream.poll(self.runtime.now(), step)
        while arrivals.ready is not None:
            await self.runtime.wait_for_data(arrivals.ready)
            arrivals = stream.poll(self.runtime.now(), step)
        wanted = self.batch_size if arrivals.count is None else arrivals.count
        pool = self.count if stream.everything else arrivals.ids[:wanted]
        if self.parts.sampler.needs_scores:
            wanted = min(wanted, self.batch_size)
        size = self.parts.sharing.own(wanted, self.runtime.comm.size)
        draw = sampler.next(self._view(step, pool, size))
        held: dict[str, Json] = {} if self.parts.even else {"held": len(arrivals.ids), **arrivals.told}
        weight = draw.weight if arrivals.weight is None else arrivals.weight
        return _Drawn(draw.ids, draw.weights, weight, {**held, **draw.told}, pool)

    def _view(self, step: int, pool: int | SampleIds, count: int) -> PoolView:
        comm, elastic = self.runtime.comm, self.runtime.elastic
        if elastic is not None:
            ranks = elastic.at(step).ranks
            place = ranks.index(comm.rank) if comm.rank in ranks else 0  # one that joins draws nothing yet
            return PoolView(step, place, len(ranks), count, pool, 1.0)
        if self.share is None:
            return PoolView(step, comm.rank, comm.size, count, pool, 1.0)
        return PoolView(step, 0, 1, count, pool, self.share)

    async def _shared(self, rows: Batch, step: int) -> Batch:
        """The step's rows after a round of the sharing."""
        channel = ExchangeChannel(self.runtime.comm, Purpose.SHARING.at(step), 0)
        shared = await self.runtime.launch(self.parts.sharing.exchange(channel, self.source, rows, step=step))
        self.sent_nbytes += channel.sent_nbytes
        return shared
