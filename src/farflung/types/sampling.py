"""Samplers: which samples a replica takes, and which of them it scores in its waits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, runtime_checkable

from farflung.types.tensors import Json, SampleIds, State
from farflung.types.world import Decision

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BALANCED",
    "PASSES",
    "Carries",
    "Draw",
    "Due",
    "PoolView",
    "Sampler",
    "ScoredBy",
    "Scores",
    "SharesOut",
    "Spare",
    "Statistics",
]

ScoredBy: TypeAlias = Literal["loss", "gradient_bound"]
"""What a sample is judged by: its loss, or the norm of its loss's gradient with respect to the model's output."""


Statistics: TypeAlias = Literal["batch", "uniform"]
"""Running statistics follow every batch, or uniform samples alone."""


@dataclass(frozen=True, slots=True)
class PoolView:
    """What a sampler may pick from at one step.

    Args:
      step: the step.
      rank: this replica among those that draw from the same samples.
      size: how many these are.
      batch_size: how many samples to pick.
      pool: the number of samples when all of them are at hand, else the ids that are, oldest first.
      share: samples that the replica holds over the mean of all replicas; 1 where all draw from the same.
    """

    step: int
    rank: int
    size: int
    batch_size: int
    pool: int | SampleIds
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Draw:
    """A batch.

    Args:
      ids: which samples.
      weights: each one's importance weight, floating; ``None`` where all weigh 1.
      weight: of the step in the mean, in batches; ``None``: by the number of samples.
      told: what telemetry says of it.
    """

    ids: SampleIds
    weights: Tensor | None = None
    weight: float | None = None
    told: Mapping[str, Json] = field(default_factory=dict)


class Sampler(Protocol):
    """Picks a batch and its importance weights; deterministic given state and seed."""

    def next(self, view: PoolView) -> Draw:
        """The batch of this replica for one step."""
        ...

    def state_dict(self) -> State:
        """Cursor, caches and scores, as of the last :meth:`next`."""
        ...

    def load_state_dict(self, state: State) -> None:
        """Continues from a state; the number of replicas may differ from when it was saved."""
        ...


BALANCED = "sampler balanced (--batch-size auto)"
"""What messages call a sampler that shares out a step."""


@runtime_checkable
class SharesOut(Protocol):
    """A sampler that shares the samples of a step out as replicas are fast; see :class:`farflung.sampling.Balanced`."""

    def meet(self, rank: int, size: int) -> None:
        """Note which replica this is, of how many."""
        ...

    def computed(self, samples: int, seconds: float) -> None:
        """Note how long this replica took for a step's samples."""
        ...

    def due(self, sums: Mapping[str, float]) -> list[float] | None:
        """Count an exchange, and return the speeds of all replicas where it is time to decide by them."""
        ...

    def decided(self, speeds: Sequence[float], batch_size: int) -> list[int]:
        """Return the shares of a step that follow from measured speeds."""
        ...

    def share(self, counts: Sequence[int]) -> None:
        """Take a step's samples so from the next one on, and measure anew."""
        ...


PASSES = 3
"""Forward passes that a gradient takes as long as."""


@dataclass(frozen=True, slots=True)
class Due:
    """What a step's wait is spent on, in chunks of samples.

    Args:
      scores: to score.
      gradients: to compute the gradient of, which is added to that of the next step, weighted by samples.
      statistics: to update running statistics by, such as a batch norm's.
    """

    scores: Sequence[SampleIds] = ()
    gradients: Sequence[SampleIds] = ()
    statistics: Sequence[SampleIds] = ()


@dataclass(frozen=True, slots=True)
class Spare:
    """What a step has left for scoring, by one replica's own clock.

    Args:
      compute_s: seconds of its forward and backward pass.
      wait_s: seconds from the end of its backward pass until its exchanges were through; 0 where they were before.
      scoring_s: seconds of scoring, and of whatever else the wait was spent on.
      scored: samples; one whose gradient was computed counts as three.
      overlaps: whether exchanges go on beside computing, so that the wait says nothing about how much may be scored.
    """

    compute_s: float
    wait_s: float
    scoring_s: float
    scored: int
    overlaps: bool


@runtime_checkable
class Scores(Protocol):
    """A sampler that has samples scored while a replica waits for its exchanges.

    Such a sampler picks from the samples that one replica holds, so replicas hold shares of the training set; where
    none are asked for, equal random ones. Of a stream it picks from what a step is to take, and the rest stays.
    """

    @property
    def scored_by(self) -> ScoredBy:
        """What samples are judged by."""
        ...

    @property
    def statistics(self) -> Statistics:
        """What running statistics are updated by."""
        ...

    def due(self, view: PoolView, decide: Callable[[str, int, Callable[[], Json]], Decision]) -> Due:
        """What to do in a step's wait.

        Args:
          view: of the step.
          decide: :meth:`farflung.types.Runtime.decide_own`; whatever is chosen by time goes through it.
        """
        ...

    def scored(self, ids: SampleIds, scores: Tensor, step: int) -> None:
        """The scores of one chunk, float32, by the model as it was before the step's update."""
        ...

    def observe(self, spare: Spare) -> None:
        """What the step had to spare; once a step, after its update."""
        ...


@runtime_checkable
class Carries(Protocol):
    """A sampler whose scores go along with samples that change their owner.

    A slot is the number by which a replica knows a sample; there are as many afterwards as before. A score below 0 says
    that its sample was never scored.
    """

    def outgoing(self, count: int, step: int) -> SampleIds:
        """The slots whose samples are given away at a step: ``count`` distinct ones.

        Raises:
          ConfigError: there are not as many.
        """
        ...

    def scores_of(self, ids: SampleIds) -> Tensor:
        """What is known of the samples in these slots, float32."""
        ...

    def incoming(self, ids: SampleIds, scores: Tensor) -> None:
        """The slots hold other samples now, with the scores that their owners knew."""
        ...
