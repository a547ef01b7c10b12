"""Samples of a replica's steps: picked, exchanged, prepared and committed."""

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
    """Samples picked for a step, kept until their gradient has been contributed.

    Args:
      ids: Sample ids.
      weights: Importance weight of each sample; ``None``: all are 1.
      weight: Weight of the step in the mean; ``None``: by the number of samples.
      telemetry: Fields of the stream and the sampler for telemetry.
      pool: Samples they were picked from; see :class:`farflung.types.DrawContext`.
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
    """Loader of the batches that a replica trains on.

    Args:
      runtime: Clock, messages and decisions of the replica.
      components: Stream, sampler and sharing of the recipe.
      source: Source of sample rows, which prepares them.
      num_samples: Number of samples, if the stream has random access.
      share: Number of this replica's own samples over the mean of all replicas; ``None``: samples are shared.
      batch_size: Batch size of a step, unless the stream sets another.
      random: Random state of this replica, installed before each draw.
    """

    runtime: Runtime
    parts: Parts
    source: Samples
    count: int
    share: float | None
    batch_size: int
    random: RandomState
    sent_nbytes: int = field(init=False, default=0)
    """Bytes of samples sent to other replicas."""
    _drawn: _Drawn | None = field(init=False, default=None)

    async def batch(self, step: int) -> tuple[Batch, Tensor | None]:
        """Loads a step's batch and its importance weights, waiting for a slow stream.

        Repeated calls return the same samples until :meth:`commit`, so an interrupted step loses none.
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
        """Picks a step's samples unless that has been done, and returns their number."""
        if self._drawn is None:
            self._drawn = await self._draw(step)
        return len(self._drawn.ids)

    @property
    def is_weighted(self) -> bool:
        """Returns True if the step's samples have importance weights."""
        return self._drawn is not None and self._drawn.weights is not None

    def view_of_rest(self, step: int) -> PoolView:
        """Builds the context of samples that the step could have drawn and has not."""
        assert self._drawn is not None
        pool, used_ids = self._drawn.pool, self._drawn.ids
        remaining = pool if isinstance(pool, int) else pool[~torch.isin(pool, used_ids)]
        return self._view(step, remaining, len(used_ids))

    def weight(self, samples: int) -> float:
        """Computes the weight in the mean of a step with ``samples`` samples."""
        assert self._drawn is not None
        return samples / self.batch_size if self._drawn.weight is None else self._drawn.weight

    def commit(self, step: int) -> Mapping[str, Json]:
        """Marks the step's samples as used, and returns telemetry fields of how they were drawn."""
        assert self._drawn is not None
        samples, self._drawn = self._drawn, None
        used_ids = samples.ids.unique() if self.parts.sampler.needs_scores else samples.ids
        self.parts.stream.commit(used_ids, step=step)
        return samples.told

    def state_dict(self) -> State:
        """Returns the samples picked for the step under way; empty between steps."""
        return {} if self._drawn is None else self._drawn.state_dict()

    def load_state_dict(self, drawn: State, sent_nbytes: int) -> None:
        """Continues from :meth:`state_dict`, and restores the number of bytes sent."""
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
        num_samples = self.batch_size if arrivals.count is None else arrivals.count
        pool = self.count if stream.everything else arrivals.ids[:num_samples]
        if self.parts.sampler.needs_scores:
            num_samples = min(num_samples, self.batch_size)
        size = self.parts.sharing.own(num_samples, self.runtime.comm.size)
        draw = sampler.next(self._view(step, pool, size))
        fields: dict[str, Json] = {} if self.parts.even else {"held": len(arrivals.ids), **arrivals.told}
        weight = draw.weight if arrivals.weight is None else arrivals.weight
        return _Drawn(draw.ids, draw.weights, weight, {**fields, **draw.told}, pool)

    def _view(self, step: int, pool: int | SampleIds, count: int) -> PoolView:
        comm, elastic = self.runtime.comm, self.runtime.elastic
        if elastic is not None:
            ranks = elastic.at(step).ranks
            index = ranks.index(comm.rank) if comm.rank in ranks else 0  # a joining replica draws nothing yet
            return PoolView(step, index, len(ranks), count, pool, 1.0)
        if self.share is None:
            return PoolView(step, comm.rank, comm.size, count, pool, 1.0)
        return PoolView(step, 0, 1, count, pool, self.share)

    async def _shared(self, rows: Batch, step: int) -> Batch:
        """Returns the step's rows after a round of the sharing."""
        channel = ExchangeChannel(self.runtime.comm, Purpose.SHARING.at(step), 0)
        batch = await self.runtime.launch(self.parts.sharing.exchange(channel, self.source, rows, step=step))
        self.sent_nbytes += channel.sent_nbytes
        return batch
