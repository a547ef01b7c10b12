"""Extensions: hooks of a training step besides gradient exchange, with empty defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from farflung.comm import ExchangeChannel
from farflung.config import Training
from farflung.engine.accumulated import AccumulatedGradient
from farflung.engine.buckets import GradientBuckets
from farflung.engine.flight import Flight
from farflung.engine.metadata import StepMetadata
from farflung.engine.plan import Arrival, StepOutcome
from farflung.telemetry import Telemetry
from farflung.types import DrawContext, Json, Reducer, Runtime, SampleIds, Sampler, Schedule, ScoreKind, State

if TYPE_CHECKING:
    from farflung.engine.engine import Engine

__all__ = ["Extension", "StepResult", "TrainingLoop"]


@dataclass(slots=True)
class StepResult:
    """Result of a complete training step.

    Args:
      step: Number of the step.
      samples: Number of samples in this rank's batch.
      outcome: Outcome of its exchanges.
      compute_s: Seconds of the forward and backward pass.
      waited_s: Seconds from the end of the backward pass until all results had arrived.
      report: Fields of the step's telemetry event; extensions may add some.
    """

    step: int
    samples: int
    outcome: StepOutcome
    compute_s: float
    waited_s: float
    report: dict[str, Json] = field(default_factory=dict)


class StepSamples(Protocol):
    """Samples of a step."""

    @property
    def is_weighted(self) -> bool:
        """Returns True if the samples have importance weights."""
        ...

    def build_wait_context(self, step: int) -> DrawContext:
        """Builds the context of samples to score while waiting: those not drawn, or all with random access."""
        ...


class TrainingLoop(Protocol):
    """Interface of farflung's own loop for parts of a recipe that create extensions.

    Args:
      runtime: Runtime of this replica.
      training: Settings.
      telemetry: Receiver of events.
      model: Model of this rank.
      optimizer: Optimizer that steps on the means.
      buckets: Buckets of the model.
      engine: Engine that exchanges them.
      batch_loader: Samples of the step.
      holding: This rank's samples, :class:`farflung.data.Holding`; ``None`` if all ranks draw from the whole set.
      accumulated_gradient: Gradient to add to the next step's mean.
    """

    runtime: Runtime
    training: Training
    telemetry: Telemetry
    model: nn.Module
    optimizer: torch.optim.Optimizer
    buckets: GradientBuckets
    engine: Engine
    holding: Any
    accumulated_gradient: AccumulatedGradient

    @property
    def batch_loader(self) -> StepSamples: ...

    @property
    def schedule(self) -> Schedule: ...

    @property
    def reducer(self) -> Reducer: ...

    @property
    def sampler(self) -> Sampler: ...

    def build_scorer(self, kind: ScoreKind) -> Callable[[SampleIds], Tensor]:
        """Returns a function that scores samples by the current model."""
        ...

    def build_loss_fn(self) -> Callable[[SampleIds], Tensor]:
        """Returns a function that computes the losses of samples outside the batch."""
        ...


class Extension:
    """Addition to a step; extensions run in the order of their list, which is equal on all ranks.

    The engine calls :meth:`report_metadata`, :meth:`handle_launch` and :meth:`handle_arrivals` in every loop. Only
    farflung's own loop calls the other hooks.
    """

    key: ClassVar[str] = ""
    """Key of the state in checkpoints; empty if there is none."""
    sent_nbytes: int = 0
    """Number of payload bytes sent by the extension's own completed exchanges."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the numbers of :meth:`report_metadata`, before the first step; equal on all ranks."""
        return ()

    async def prepare_step(self, step: int) -> None:
        """Runs before the samples of a step are drawn."""

    def compute_context(self, step: int) -> AbstractContextManager[object]:
        """Returns a context for the forward and backward pass."""
        del step
        return nullcontext()

    def report_metadata(self, metadata: StepMetadata) -> Mapping[str, float]:
        """Returns numbers that are summed over all ranks in the step's metadata."""
        del metadata
        return {}

    def handle_launch(self, flight: Flight, tensors: Sequence[Tensor]) -> None:
        """Runs before an exchange of these contributions starts, one for each bucket."""

    async def use_wait(self, step: int) -> None:
        """Runs after the backward pass, while exchanges are in flight."""

    def handle_arrivals(self, arrivals: Sequence[Arrival]) -> None:
        """Runs when all exchanges of a step have arrived, before they are applied."""

    async def finish_step(self, result: StepResult) -> None:
        """Runs when a step is complete."""

    async def finish(self) -> None:
        """Runs after the last step."""

    @property
    def channels(self) -> Sequence[ExchangeChannel]:
        """Channels of the extension's own exchanges in flight, which a resumed run repeats."""
        return ()

    def state_dict(self) -> State:
        """Returns the state to resume from."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Restores :meth:`state_dict`."""
