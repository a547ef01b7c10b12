"""Extensions of farflung's training loop: metadata of components, joins, and a trace of exchanges."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from typing_extensions import override

from farflung.engine.extension import Extension, StepResult
from farflung.engine.metadata import StepMetadata
from farflung.engine.plan import Arrival
from farflung.loop.components import Components
from farflung.telemetry import Telemetry
from farflung.types import ElasticMembership, Runtime

__all__ = ["ExchangeTrace", "JoinHandler", "MetadataExtension"]


class MetadataExtension(Extension):
    """Extension that adds metadata of a recipe's components to a step's, and its samples if batch sizes differ."""

    def __init__(self, components: Components) -> None:
        self._components = (components.stream, components.sampler, components.sharing)
        self._has_equal_batch_sizes = components.has_equal_batch_sizes

    @property
    @override
    def names(self) -> Sequence[str]:
        return tuple(self.report_metadata(StepMetadata(0.0, 0.0)))

    @override
    def report_metadata(self, metadata: StepMetadata) -> Mapping[str, float]:
        numbers = {} if self._has_equal_batch_sizes else {"samples": float(metadata.samples)}
        for part in self._components:
            numbers.update(part.report_metadata())
        return numbers


class JoinHandler(Extension):
    """Extension that publishes the state before a step, and reports changes of members after it.

    Args:
      runtime: Runtime with the members of an elastic run.
      telemetry: Receiver of the events.
      offer_state: Publishes the state for replicas that begin at a step.
    """

    def __init__(
        self,
        runtime: Runtime,
        telemetry: Telemetry,
        offer_state: Callable[[ElasticMembership, int], Awaitable[None]],
    ) -> None:
        self._runtime, self._telemetry, self._offer_state = runtime, telemetry, offer_state
        self._num_reported = 1

    @override
    async def prepare_step(self, step: int) -> None:
        elastic = self._runtime.elastic
        if elastic is not None and elastic.should_publish_state(step):
            await self._offer_state(elastic, step)

    @override
    async def finish_step(self, result: StepResult) -> None:
        changes = () if self._runtime.elastic is None else self._runtime.elastic.changes
        for change in changes[self._num_reported :]:
            self._telemetry.emit(
                "view",
                t=change.time_s,
                step=change.step,
                view=change.view,
                members=list(change.ranks),
                joined=list(change.joined_ranks),
                lost=list(change.lost_ranks),
                repeated_steps=list(change.repeated_steps),
            )
        self._num_reported = max(self._num_reported, len(changes))


class ExchangeTrace(Extension):
    """Extension that emits an event for each exchange that has arrived.

    Args:
      telemetry: Receiver of the events.
      runtime: Runtime with the clock.
    """

    def __init__(self, telemetry: Telemetry, runtime: Runtime) -> None:
        self._telemetry, self._read_clock = telemetry, runtime.read_clock

    @override
    def handle_arrivals(self, arrivals: Sequence[Arrival]) -> None:
        for flight, _, _ in arrivals:
            self._telemetry.emit(
                "exchange",
                t=self._read_clock() if flight.end_s is None else flight.end_s,
                step=flight.step,
                due_step=flight.merge_step,
                bucket=flight.unit.number,
                began_s=flight.start_s,
                bytes_sent=flight.exchange.channel.sent_nbytes,
            )
