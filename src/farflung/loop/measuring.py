"""Extensions that watch exchanges: the measured gain of sampling, and the trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from farflung.engine.extension import Extension
from farflung.engine.flight import Flight
from farflung.engine.metadata import StepMetadata
from farflung.engine.plan import Arrival
from farflung.sampling import Gain
from farflung.telemetry import Telemetry
from farflung.types import Decision, Reducer, Runtime, Schedule

__all__ = ["MeasuredGain", "Trace", "reason_incomparable"]


def reason_incomparable(size: int, schedule: Schedule, reducer: Reducer) -> str:
    """Returns why ranks' gradients cannot be compared with their mean; empty if they can."""
    if size == 1:
        return "one replica"
    if not schedule.moves_gradients:
        return f"replicas' parameters differ under {type(schedule).__name__}"
    codec = getattr(reducer, "codec", None)
    if not getattr(codec, "per_hop", False):
        return f"{type(codec or reducer).__name__} changes gradients"
    return ""


class MeasuredGain(Extension):
    """Measures for a sampler how gradients differ between ranks; what it chooses is a decision of the run.

    Args:
      gain: of the sampler.
      runtime: the world.
      schedule: of the run.
      reducer: of the run.
    """

    def __init__(self, gain: Gain, runtime: Runtime, schedule: Schedule, reducer: Reducer) -> None:
        self._gain, self._runtime = gain, runtime
        self._names = gain.begins(reason_incomparable(runtime.comm.size, schedule, reducer))

    @property
    @override
    def names(self) -> Sequence[str]:
        return self._names

    @override
    def metadata(self, own: StepMetadata) -> Mapping[str, float]:
        return self._gain.tell() if self._names else {}

    @override
    def on_launch(self, flight: Flight, tensors: Sequence[Tensor]) -> None:
        if self._names:
            flight.notes["square"] = _square(tensors)

    @override
    def on_arrival(self, arrivals: Sequence[Arrival]) -> None:
        if not self._names:
            return
        flight, reduced, metadata = arrivals[0]
        is_rank_0 = self._runtime.comm.rank == 0
        if not any(arrival.metadata.num_nonfinite for arrival in arrivals):
            self._gain.measured(
                sum(arrival.flight.notes.get("square", 0.0) for arrival in arrivals),
                _square([arrival.reduced.mean for arrival in arrivals]),
                flight.weight / reduced.weight if reduced.weight else 0.0,
                first=is_rank_0,
            )
        if flight.is_first_of_step and self._gain.learn(metadata.sums) and is_rank_0:
            self._runtime.decisions.record(Decision("sampling", flight.step, self._gain.rule, timing=False))


class Trace(Extension):
    """Emits an event for each exchange that has arrived.

    Args:
      telemetry: where events go.
      runtime: has the clock.
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


def _square(tensors: Sequence[Tensor]) -> float:
    """Returns the square of the norm of all tensors together."""
    return sum(float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in tensors)
