"""Samplers: which samples a replica takes, and which of them it scores in its waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from farflung.types.tensors import Json, SampleIds, State

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BALANCED",
    "PASSES",
    "Draw",
    "Due",
    "PoolView",
    "Sampler",
    "ScoredBy",
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


BALANCED = "sampler balanced (--batch-size auto)"
"""What messages call a sampler that shares out a step."""


class Sampler(ABC):
    """Picks a batch and its importance weights; deterministic given state and seed.

    All but :meth:`next` has a default. A sampler with state overrides :meth:`state_dict` and :meth:`load_state_dict`;
    one that does something in a step besides drawing has :meth:`extensions`.
    """

    @abstractmethod
    def next(self, view: PoolView) -> Draw:
        """The batch of this replica for one step."""

    def state_dict(self) -> State:
        """Cursor, caches and scores, as of the last :meth:`next`."""
        return {}

    def load_state_dict(self, state: State) -> None:  # noqa: B027
        """Continues from a state; the number of replicas may differ from when it was saved."""

    def report_metadata(self) -> Mapping[str, float]:
        """Returns numbers of the step under way, always by the same names; summed in :attr:`SharedStats.sums`."""
        return {}

    def extensions(self, loop: Any) -> Sequence[Any]:
        """Returns what the sampler adds to a run.

        Args:
          loop: :class:`farflung.engine.TrainingLoop`.

        Returns:
          Objects of :class:`farflung.engine.Extension`.
        """
        del loop
        return ()

    def report(self) -> Mapping[str, Json]:
        """Returns the sampler's own figures, for the summary of a run."""
        return {}

    # --- one order of all samples, of which a part can be given back ----------------------------------------------

    has_shared_order: bool = False
    """Whether replicas take their samples from one order of the whole set, so that parts of it can be given back."""

    def give_back(self, step: int, rank: int) -> None:
        """Returns what a rank took at one of the latest steps, so that it is taken again."""
        raise NotImplementedError

    def latest(self) -> State:
        """Returns what a joiner needs beside :meth:`state_dict`, so that it gives back as the others do."""
        return {}

    is_balanced: bool = False
    """Whether a fast replica takes more samples of a step than a slow one; see :class:`farflung.sampling.Balanced`."""
    needs_scores: bool = False
    """Whether samples are scored in a step's wait; see :class:`farflung.sampling.ScoringSampler`."""

    # --- scores that go along with samples that change their owner ------------------------------------------------

    carries_scores: bool = False
    """Whether the methods below are there.

    A slot is the number by which a replica knows a sample; there are as many afterwards as before. A score below 0 says
    that its sample was never scored.
    """

    def outgoing(self, count: int, step: int) -> SampleIds:
        """Returns the slots whose samples are given away at a step: ``count`` distinct ones.

        Raises:
          ConfigError: there are not as many.
        """
        raise NotImplementedError

    def scores_of(self, ids: SampleIds) -> Tensor | None:
        """Returns what is known of the samples in these slots, float32; ``None`` where scores are not carried."""
        del ids
        return None

    def incoming(self, ids: SampleIds, scores: Tensor) -> None:  # noqa: B027
        """Notes that the slots hold other samples now, with the scores that their owners knew."""
