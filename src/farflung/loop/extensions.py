"""The extensions of farflung's own loop: numbers of its parts, balanced batches, members that join."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from typing_extensions import override

from farflung.engine.extension import Extension, StepResult
from farflung.engine.metadata import StepMetadata
from farflung.files import deciding
from farflung.loop.members import Parts
from farflung.telemetry import Telemetry
from farflung.types import Elastic, Json, Runtime, Sampler

__all__ = ["BalancedBatches", "Joins", "StepNumbers"]

SHARES = "shares"
"""Name of the decisions on how many samples each rank takes from the step after."""


class StepNumbers(Extension):
    """Adds the numbers of a recipe's parts to a step's metadata, and its samples if ranks take different numbers."""

    def __init__(self, parts: Parts) -> None:
        self._parts = (parts.stream, parts.sampler, parts.sharing)
        self._is_even = parts.even

    @property
    @override
    def names(self) -> Sequence[str]:
        return tuple(self.metadata(StepMetadata(0.0, 0.0)))

    @override
    def metadata(self, own: StepMetadata) -> Mapping[str, float]:
        numbers = {} if self._is_even else {"samples": float(own.samples)}
        for part in self._parts:
            numbers.update(part.report_metadata())
        return numbers


class BalancedBatches(Extension):
    """Shares out a step's samples by the speeds of the ranks.

    Args:
      runtime: the world.
      sampler: measures speeds, and draws the rank's share.
      batch_size: of all ranks on average.
      telemetry: gets an event for each choice.
    """

    def __init__(self, runtime: Runtime, sampler: Sampler, batch_size: int, telemetry: Telemetry) -> None:
        self._runtime, self._sampler = runtime, sampler
        self._batch_size, self._telemetry = batch_size, telemetry
        sampler.set_rank(runtime.comm.rank, runtime.comm.size)

    @override
    async def after_step(self, result: StepResult) -> None:
        self._sampler.record_compute(result.samples, result.compute_s)
        speeds = self._sampler.speeds_due(result.outcome.sums)
        if speeds is None:
            return
        counts, step = self._sampler.choose_counts(speeds, self._batch_size), result.step
        # Rank 0's choice is sent, since the log of a run that is replayed need not be on each machine.
        decision = await self._runtime.decide(SHARES, step, lambda: list[Json](counts))
        with deciding(SHARES, step):
            chosen: Any = decision.value
            if sum(chosen) != sum(counts):
                raise ValueError(f"{sum(chosen)} samples in a step of {sum(counts)}")
            self._sampler.set_counts(chosen)
            self._telemetry.emit("shares", t=self._runtime.now(), step=step, samples=list[Json](chosen))


class Joins(Extension):
    """Offers the state of the run to replicas that join it, and emits an event for each change of the members.

    Args:
      runtime: has the members, if some may be lost.
      telemetry: gets the events.
      offer: offers the state for those that begin at a step.
    """

    def __init__(
        self, runtime: Runtime, telemetry: Telemetry, offer: Callable[[Elastic, int], Awaitable[None]]
    ) -> None:
        self._runtime, self._telemetry, self._offer = runtime, telemetry, offer
        self._num_reported = 1

    @override
    async def before_step(self, step: int) -> None:
        elastic = self._runtime.elastic
        if elastic is not None and elastic.begin_step(step):
            await self._offer(elastic, step)

    @override
    async def after_step(self, result: StepResult) -> None:
        changes = () if self._runtime.elastic is None else self._runtime.elastic.changes
        for change in changes[self._num_reported :]:
            self._telemetry.emit(
                "view",
                t=change.t,
                step=change.step,
                view=change.view,
                members=list(change.ranks),
                joined=list(change.joined),
                lost=list(change.lost),
                again=list(change.again),
            )
        self._num_reported = max(self._num_reported, len(changes))
