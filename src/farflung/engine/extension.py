"""Extensions: what a run does besides exchanging gradients, as hooks with empty defaults."""

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
from farflung.types import Json, PoolView, Reducer, Runtime, SampleIds, Sampler, Schedule, ScoredBy, State

if TYPE_CHECKING:
    from farflung.engine.engine import Engine

__all__ = ["Extension", "StepResult", "TrainingLoop"]


@dataclass(slots=True)
class StepResult:
    """A training step that is complete.

    Args:
      step: its number.
      samples: of this rank's batch.
      outcome: of its exchanges.
      compute_s: seconds of the forward and backward pass.
      waited_s: seconds from the end of the backward pass until all results had arrived.
      report: fields of the step's telemetry event; extensions may add some.
    """

    step: int
    samples: int
    outcome: StepOutcome
    compute_s: float
    waited_s: float
    report: dict[str, Json] = field(default_factory=dict)


class StepSamples(Protocol):
    """The samples of a step."""

    @property
    def is_weighted(self) -> bool:
        """Returns True if the samples have importance weights."""
        ...

    def view_of_rest(self, step: int) -> PoolView:
        """Returns the samples that a step could have drawn and has not."""
        ...


class TrainingLoop(Protocol):
    """farflung's own loop, as parts of a recipe see it when they make extensions.

    Args:
      runtime: the world.
      training: settings.
      telemetry: gets events.
      model: of this rank.
      optimizer: steps on the means.
      buckets: of the model.
      engine: exchanges them.
      drawing: the step's samples.
      held: this rank's own samples, :class:`farflung.data.Holding`; ``None`` if all ranks draw from the whole set.
      accumulated: gradient that the next step's mean takes in.
    """

    runtime: Runtime
    training: Training
    telemetry: Telemetry
    model: nn.Module
    optimizer: torch.optim.Optimizer
    buckets: GradientBuckets
    engine: Engine
    held: Any
    accumulated: AccumulatedGradient

    @property
    def drawing(self) -> StepSamples: ...

    @property
    def schedule(self) -> Schedule: ...

    @property
    def reducer(self) -> Reducer: ...

    @property
    def sampler(self) -> Sampler: ...

    def scorer(self, by: ScoredBy) -> Callable[[SampleIds], Tensor]:
        """Returns a function that scores samples by the model as it is."""
        ...

    def losses(self) -> Callable[[SampleIds], Tensor]:
        """Returns a function that computes the losses of samples beside a step's batch."""
        ...


class Extension:
    """Adds to a step; extensions run in the order of their list, which is equal on all ranks.

    :meth:`metadata`, :meth:`on_launch` and :meth:`on_arrival` are called by the engine in every loop; the other hooks
    by farflung's own loop alone.
    """

    key: ClassVar[str] = ""
    """Key of the state in checkpoints; empty: there is none."""
    sent_nbytes: int = 0
    """Payload bytes sent by exchanges of the extension's own that have ended."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the numbers that :meth:`metadata` returns, before the first step; equal on all ranks."""
        return ()

    async def before_step(self, step: int) -> None:
        """Runs before the samples of a step are drawn."""

    def computing(self, step: int) -> AbstractContextManager[object]:
        """Returns a context for the forward and backward pass."""
        del step
        return nullcontext()

    def metadata(self, own: StepMetadata) -> Mapping[str, float]:
        """Returns numbers to be summed over all ranks beside the step's gradients."""
        del own
        return {}

    def on_launch(self, flight: Flight, tensors: Sequence[Tensor]) -> None:
        """Runs before an exchange starts with these contributions, one for each bucket."""

    async def while_waiting(self, step: int) -> None:
        """Runs after the backward pass, while exchanges are in flight."""

    def on_arrival(self, arrivals: Sequence[Arrival]) -> None:
        """Runs when all exchanges of a step have arrived, before they are applied."""

    async def after_step(self, result: StepResult) -> None:
        """Runs when a step is complete."""

    async def finish(self) -> None:
        """Runs after the last step."""

    @property
    def channels(self) -> Sequence[ExchangeChannel]:
        """Channels of the extension's own exchanges in flight, which a resumed run repeats."""
        return ()

    def state_dict(self) -> State:
        """Returns what a resumed run continues from."""
        return {}

    def load_state_dict(self, state: State) -> None:
        """Continues from :meth:`state_dict`."""
