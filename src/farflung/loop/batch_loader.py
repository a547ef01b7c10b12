"""Samples of a replica's steps: picked, exchanged, prepared and committed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose
from farflung.loop.components import Components
from farflung.seeding import RandomState
from farflung.types import (
    Batch,
    DrawContext,
    Json,
    Runtime,
    SampleIds,
    Samples,
    State,
)

__all__ = ["BatchLoader"]


@dataclass(frozen=True, slots=True)
class _PickedSamples:
    """Samples picked for a step, kept until their gradient has been contributed.

    Args:
      ids: Sample ids.
      weights: Importance weight of each sample; ``None``: all are 1.
      weight: Weight of the step in the mean; ``None``: by the number of samples.
      metrics: Fields of the stream and the sampler for telemetry.
      pool: Samples they were picked from; see :class:`farflung.types.DrawContext`.
    """

    ids: SampleIds
    weights: Tensor | None
    weight: float | None
    metrics: Mapping[str, Json]
    pool: int | SampleIds

    def state_dict(self) -> State:
        weights = {} if self.weights is None else {"weights": self.weights}
        drawn = {"ids": self.ids, **weights}
        return {**drawn, "weight": self.weight, "metrics": dict(self.metrics), "pool": self.pool}

    @staticmethod
    def from_state(state: State) -> _PickedSamples:
        return _PickedSamples(
            state["ids"], state.get("weights"), state["weight"], state["metrics"], state["pool"]
        )


@dataclass(slots=True)
class BatchLoader:
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
    components: Components
    source: Samples
    num_samples: int
    share: float | None
    batch_size: int
    random: RandomState
    sent_nbytes: int = field(init=False, default=0)
    """Bytes of samples sent to other replicas."""
    _picked_samples: _PickedSamples | None = field(init=False, default=None)

    async def load_batch(self, step: int) -> tuple[Batch, Tensor | None]:
        """Loads a step's batch and its importance weights, waiting for a slow stream.

        Repeated calls return the same samples until :meth:`commit`, so an interrupted step loses none.
        """
        await self.pick(step)
        assert self._picked_samples is not None
        self.random.install()
        rows = self.source.get_rows(self._picked_samples.ids)
        if self.components.sharing.is_injection_due(step):
            rows = await self._exchange_rows(rows, step)
            self.random.install()
        batch = self.source.prepare(rows, train=True)
        weights = self._picked_samples.weights
        if weights is not None and len(weights) < len(batch):
            weights = torch.cat([weights, weights.new_ones(len(batch) - len(weights))])
        return batch, weights

    async def pick(self, step: int) -> int:
        """Picks a step's samples unless that has been done, and returns their number."""
        if self._picked_samples is None:
            self._picked_samples = await self._draw(step)
        return len(self._picked_samples.ids)

    @property
    def is_weighted(self) -> bool:
        """Returns True if the step's samples have importance weights."""
        return self._picked_samples is not None and self._picked_samples.weights is not None

    def build_wait_context(self, step: int) -> DrawContext:
        """Builds the context of samples to score while waiting: those not drawn, or all with random access."""
        assert self._picked_samples is not None
        pool, used_ids = self._picked_samples.pool, self._picked_samples.ids
        remaining = pool if isinstance(pool, int) else pool[~torch.isin(pool, used_ids)]
        return self._build_context(step, remaining, len(used_ids))

    def compute_weight(self, samples: int) -> float:
        """Computes the weight in the mean of a step with ``samples`` samples."""
        assert self._picked_samples is not None
        return (
            samples / self.batch_size if self._picked_samples.weight is None else self._picked_samples.weight
        )

    def commit(self, step: int) -> Mapping[str, Json]:
        """Marks the step's samples as used, and returns telemetry fields of how they were drawn."""
        assert self._picked_samples is not None
        samples, self._picked_samples = self._picked_samples, None
        used_ids = samples.ids.unique() if self.components.sampler.needs_scores else samples.ids
        self.components.stream.commit(used_ids, step=step)
        return samples.metrics

    def state_dict(self) -> State:
        """Returns the samples picked for the step under way; empty between steps."""
        return {} if self._picked_samples is None else self._picked_samples.state_dict()

    def load_state_dict(self, state: State, sent_nbytes: int) -> None:
        """Continues from :meth:`state_dict`, and restores the number of bytes sent."""
        self._picked_samples = _PickedSamples.from_state(state) if state else None
        self.sent_nbytes = sent_nbytes

    async def _draw(self, step: int) -> _PickedSamples:
        stream, sampler = self.components.stream, self.components.sampler
        if self.runtime.elastic is not None:
            self.runtime.elastic.return_batches(step, sampler)
        arrivals = stream.poll(self.runtime.read_clock(), step)
        while arrivals.next_poll is not None:
            await self.runtime.wait_for_data(arrivals.next_poll)
            arrivals = stream.poll(self.runtime.read_clock(), step)
        num_samples = self.batch_size if arrivals.count is None else arrivals.count
        pool = self.num_samples if stream.has_random_access else arrivals.ids[:num_samples]
        if self.components.sampler.needs_scores:
            num_samples = min(num_samples, self.batch_size)
        size = self.components.sharing.get_local_batch_size(num_samples, self.runtime.comm.size)
        draw = sampler.draw(self._build_context(step, pool, size))
        fields: dict[str, Json] = (
            {}
            if self.components.has_equal_batch_sizes
            else {"buffered": len(arrivals.ids), **arrivals.metrics}
        )
        weight = draw.weight if arrivals.weight is None else arrivals.weight
        return _PickedSamples(draw.ids, draw.weights, weight, {**fields, **draw.metrics}, pool)

    def _build_context(self, step: int, pool: int | SampleIds, count: int) -> DrawContext:
        comm, elastic = self.runtime.comm, self.runtime.elastic
        if elastic is not None:
            ranks = elastic.find_change(step).ranks
            index = ranks.index(comm.rank) if comm.rank in ranks else 0  # a joining replica draws nothing yet
            return DrawContext(step, index, len(ranks), count, pool, 1.0)
        if self.share is None:
            return DrawContext(step, comm.rank, comm.size, count, pool, 1.0)
        return DrawContext(step, 0, 1, count, pool, self.share)

    async def _exchange_rows(self, rows: Batch, step: int) -> Batch:
        """Returns the step's rows after a round of the sharing."""
        channel = ExchangeChannel(self.runtime.comm, Purpose.SHARING.build_exchange_id(step), 0)
        batch = await self.runtime.launch(
            self.components.sharing.inject_samples(channel, self.source, rows, step=step)
        )
        self.sent_nbytes += channel.sent_nbytes
        return batch
