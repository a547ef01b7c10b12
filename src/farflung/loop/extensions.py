"""Extensions of farflung's training loop: metadata of components, joins, and a trace of exchanges."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from typing_extensions import override

from farflung.engine.extension import Extension, StepResult
from farflung.engine.metadata import StepMetadata
from farflung.engine.plan import Arrival
from farflung.loop.members import Parts
from farflung.telemetry import Telemetry
from farflung.types import Elastic, Runtime

__all__ = ["Joins", "StepNumbers", "Trace"]


class StepNumbers(Extension):
    """Extension that adds metadata of a recipe's components to a step's, and its samples if batch sizes differ."""

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


class Joins(Extension):
    """Extension that publishes the state of the run for joining replicas, and reports changes of members.

    Args:
      runtime: Runtime with the members of an elastic run.
      telemetry: Receiver of the events.
      offer_state: Publishes the state for replicas that begin at a step.
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


class Trace(Extension):
    """Extension that emits an event for each exchange that has arrived.

    Args:
      telemetry: Receiver of the events.
      runtime: Runtime with the clock.
    """

    def __init__(self, telemetry: Telemetry, runtime: Runtime) -> None:
        self._telemetry, self._now = telemetry, runtime.now

    @override
    def on_arrival(self, arrivals: Sequence[Arrival]) -> None:
        for flight, _, _ in arrivals:
            self._telemetry.emit(
                "exchange",
                t=self._now() if flight.ended_s is None else flight.ended_s,
                step=flight.step,
                due_step=flight.due_step,
                bucket=flight.unit.number,
                began_s=flight.began_s,
                bytes_sent=flight.channel.sent_nbytes,
            )
