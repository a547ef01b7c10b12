"""Launches the exchanges a schedule plans, and merges their results when they are due."""

from __future__ import annotations

import math
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from farflung.comm import ExchangeChannel, Purpose
from farflung.errors import NonFinite, Unsupported
from farflung.replica.buckets import GradientBuckets
from farflung.seeding import derive
from farflung.tasks import Pending
from farflung.types import (
    Bucket,
    Contribution,
    Reduced,
    Reducer,
    Replace,
    Runtime,
    Schedule,
    Seeds,
    SharedStats,
    State,
    StateSlot,
    Transfer,
)

__all__ = ["Exchanges", "Settled", "Vote"]


@dataclass(frozen=True, slots=True)
class Vote:
    """What a replica says beside its gradient; summed over all, so that everybody decides alike.

    Args:
      loss: this replica's weighted mean loss.
      weight: its weight in the mean.
      stop: whether it was asked to stop.
    """

    loss: float
    weight: float
    stop: bool = False

    @property
    def finite(self) -> bool:
        """Whether the loss is a number."""
        return math.isfinite(self.loss)

    def rider(self, rank: int) -> Tensor:
        """``[loss numerator, non-finite losses, sum and sum of squares of their ranks, stops]``."""
        bad = not self.finite
        loss = 0.0 if bad else self.loss * self.weight
        return torch.tensor([loss, bad, bad * rank, bad * rank**2, self.stop], dtype=torch.float64)


@dataclass(slots=True)
class _InFlight:
    step: int
    transfer: Transfer
    result: Pending[Reduced]
    channel: ExchangeChannel


@dataclass(frozen=True, slots=True)
class Settled:
    """What a step's exchanges have brought once they are merged."""

    apply: bool
    """Whether the optimizer has a gradient to step on."""
    nonfinite: int
    """How many replicas had a non-finite loss; they contributed nothing."""
    stats: SharedStats | None
    """Of the step whose exchange was due; ``None`` where none was."""
    stop: bool
    """Whether any replica asked to stop."""


class Exchanges:
    """One replica's exchanges: launched as buckets fill, merged when the schedule says they are due.

    Args:
      runtime: the world.
      buckets: the model's gradients.
      reducer: carries each bucket.
      schedule: says what starts when and is due when.
      seed: the run's.
      on_nonfinite: what to do where a replica's loss is not finite; see :class:`farflung.config.Training`.
    """

    def __init__(
        self,
        runtime: Runtime,
        buckets: GradientBuckets,
        reducer: Reducer,
        schedule: Schedule,
        seed: int,
        on_nonfinite: str = "stop",
    ) -> None:
        self._on_nonfinite = on_nonfinite
        self._runtime, self._buckets, self._reducer, self._schedule = runtime, buckets, reducer, schedule
        self._state = schedule.init(buckets.buckets)
        rank = runtime.comm.rank
        self._slots = [
            StateSlot(
                reducer.init(
                    bucket.spec,
                    Seeds(derive(seed, "codec", bucket.index), derive(seed, "codec", bucket.index, rank)),
                )
            )
            for bucket in buckets.buckets
        ]
        self._in_flight: list[_InFlight] = []
        self._planned: dict[int, Transfer] = {}
        self._launchable = 0
        self._filled: set[int] = set()
        self._step, self._vote = 0, Vote(0.0, 0.0)
        self.sent_nbytes = 0

    def begin(self, step: int, vote: Vote) -> None:
        """Plans a step, before its backward pass."""
        self._step, self._vote = step, vote
        self._planned = {
            _bucket_of(transfer).index: transfer for transfer in self._schedule.plan(self._state, step)
        }
        self._filled.clear()
        self._launchable = 0

    def ready(self, index: int) -> None:
        """A bucket has filled: launches what was waiting for it.

        Buckets start in order, on every rank the same: the backend's own collectives match by nothing else.
        """
        self._filled.add(index)
        while self._launchable in self._filled:
            transfer = self._planned.get(self._launchable)
            if transfer is not None:
                self._launch(transfer)
            self._launchable += 1

    async def settle(self) -> Settled:
        """Waits for what is due at this step's optimizer, and merges it.

        Raises:
          NonFinite: a replica had a non-finite loss; on all replicas at the same step, before the update.
        """
        due = [flight for flight in self._in_flight if flight.transfer.due_step <= self._step]
        self._in_flight = [flight for flight in self._in_flight if flight.transfer.due_step > self._step]
        stats, stop, nonfinite = None, False, 0
        for flight in due:
            reduced = await flight.result
            self.sent_nbytes += flight.channel.sent_nbytes
            index = _bucket_of(flight.transfer).index
            if reduced.learn is not None:
                await self._runtime.launch(_learn(self._slots[index], reduced))
            if stats is None:
                nonfinite, stop = int(reduced.rider[1]), bool(reduced.rider[4])
                if nonfinite and self._on_nonfinite == "stop":
                    raise NonFinite(flight.step, _bad_ranks(reduced.rider), nonfinite)
                stats = _stats(flight.step, reduced)
            self._buckets.load(index, reduced.mean)
        if stats is not None:
            self._state = self._schedule.observe(self._state, stats)
        apply = self._schedule.steps_on == "own" or bool(due)
        if nonfinite and (self._on_nonfinite == "skip" or (stats is not None and stats.weight == 0)):
            apply = False
        return Settled(apply, nonfinite, stats, stop)

    async def state_dict(self) -> State:
        """Reducer and schedule state; nothing may be in flight."""
        assert not self._in_flight
        return await self._runtime.launch(self._snapshot())

    def load_state_dict(self, state: State) -> None:
        """Continues from :meth:`state_dict`."""
        self.sent_nbytes = state["sent_nbytes"]
        for slot, kept in zip(self._slots, state["slots"].values(), strict=True):
            slot.state = type(slot.state)(kept["shared"], kept["local"])

    async def _snapshot(self) -> State:
        return {
            "sent_nbytes": self.sent_nbytes,
            "slots": {
                str(index): {"shared": slot.state.shared, "local": slot.state.local}
                for index, slot in enumerate(self._slots)
            },
        }

    def _launch(self, transfer: Transfer) -> None:
        if transfer.what != "gradient" or not isinstance(transfer.merge, Replace):
            raise Unsupported(f"no replica merges {transfer.what} by {type(transfer.merge).__name__} yet")
        bucket = _bucket_of(transfer)
        tensor = self._buckets.flat(bucket.index)
        if transfer.due_step > self._step:
            tensor = tensor.clone()
        weight = self._vote.weight
        if not self._vote.finite:
            # Zeros with no weight: neither the mean nor a residual may ever see this gradient.
            tensor.zero_()
            weight = 0.0
        rider = self._vote.rider(self._runtime.comm.rank)
        channel = ExchangeChannel(self._runtime.comm, Purpose.STEP.at(self._step), bucket.index)
        exchange: Coroutine[Any, None, Reduced] = self._reducer.reduce(
            channel,
            self._slots[bucket.index],
            Contribution(tensor, weight, rider),
            step=self._step,
        )
        self._in_flight.append(_InFlight(self._step, transfer, self._runtime.launch(exchange), channel))


async def _learn(slot: StateSlot, reduced: Reduced) -> None:
    assert reduced.learn is not None
    slot.state = reduced.learn(slot.state)


def _bucket_of(transfer: Transfer) -> Bucket:
    if not isinstance(transfer.part, Bucket):
        raise Unsupported(f"no replica moves a {type(transfer.part).__name__} yet")
    return transfer.part


def _stats(step: int, reduced: Reduced) -> SharedStats:
    loss = float(reduced.rider[0])
    return SharedStats(step, loss / reduced.weight if reduced.weight else 0.0, reduced.weight)


def _bad_ranks(rider: Tensor) -> list[int]:
    """Who they were, from how many, the sum and the sum of squares of their ranks; empty for more than two."""
    _, bad, ranks, squares, _ = rider.tolist()
    if bad == 1:
        return [int(ranks)]
    if bad == 2:
        spread = (2 * squares - ranks**2) ** 0.5
        return [round((ranks - spread) / 2), round((ranks + spread) / 2)]
    return []
