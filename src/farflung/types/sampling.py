"""Interface of samplers, which choose the samples to train on and to score during waits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from farflung.types.tensors import Json, SampleIds, State

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "BALANCED_LABEL",
    "FORWARDS_PER_GRADIENT",
    "Draw",
    "DrawContext",
    "Sampler",
    "ScoreKind",
    "ScoringTimes",
    "StatisticsSource",
    "WaitWork",
]

ScoreKind: TypeAlias = Literal["loss", "gradient_bound"]
"""Score of a sample: its loss, or the norm of the loss's gradient with respect to the output."""


StatisticsSource: TypeAlias = Literal["batch", "uniform"]
"""Samples that update running statistics: every batch, or uniform samples only."""


@dataclass(frozen=True, slots=True)
class DrawContext:
    """Samples that a sampler may pick from at one step.

    Args:
      step: Number of the step.
      rank: Rank among the replicas that draw from the same samples.
      size: Number of these replicas.
      batch_size: Number of samples to pick.
      pool: Number of samples if all are available, otherwise the available ids, oldest first.
      share: Samples of the replica over the mean of all replicas; 1 if all draw from the same samples.
    """

    step: int
    rank: int
    size: int
    batch_size: int
    pool: int | SampleIds
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Draw:
    """Batch drawn by a sampler.

    Args:
      ids: Indices of the samples.
      weights: Importance weight of each sample, floating; ``None`` if all weigh 1.
      weight: Weight of the step in the mean, in batches; ``None`` for the number of samples.
      metrics: Telemetry of the draw.
    """

    ids: SampleIds
    weights: Tensor | None = None
    weight: float | None = None
    metrics: Mapping[str, Json] = field(default_factory=dict)


FORWARDS_PER_GRADIENT = 3
"""Cost of a gradient in forward passes."""


@dataclass(frozen=True, slots=True)
class WaitWork:
    """Work for a step's wait, in chunks of samples.

    Args:
      scores: Samples to score.
      gradients: Samples whose gradient is added to that of the next step, weighted by samples.
      statistics: Samples that update running statistics, such as a batch norm's.
    """

    scores: Sequence[SampleIds] = ()
    gradients: Sequence[SampleIds] = ()
    statistics: Sequence[SampleIds] = ()


@dataclass(frozen=True, slots=True)
class ScoringTimes:
    """Times of a step that determine how many samples to score, by the replica's own clock.

    Args:
      compute_s: Seconds of the forward and backward pass.
      wait_s: Seconds from the end of the backward pass until the exchanges completed; 0 if they completed before.
      scoring_s: Seconds of scoring and other work during the wait.
      num_scored: Number of scored samples; one whose gradient was computed counts as three.
      has_overlap: True if exchanges overlap computing, so that the wait does not bound the scoring.
    """

    compute_s: float
    wait_s: float
    scoring_s: float
    num_scored: int
    has_overlap: bool


BALANCED_LABEL = "sampler balanced (--batch-size auto)"
"""Name of a sampler that balances a step, in messages."""


class Sampler(ABC):
    """Draws a batch and its importance weights; deterministic given state and seed.

    All methods but :meth:`draw` have a default. A sampler with state overrides :meth:`state_dict` and
    :meth:`load_state_dict`. One that does more in a step than drawing overrides :meth:`build_extensions`.
    """

    @abstractmethod
    def draw(self, context: DrawContext) -> Draw:
        """Draws the batch of this replica for one step."""

    def state_dict(self) -> State:
        """Returns cursor, caches and scores, as of the last :meth:`draw`."""
        return {}

    def load_state_dict(self, state: State) -> None:  # noqa: B027
        """Restores a state; the number of replicas may differ from when it was saved."""

    def report_metadata(self) -> Mapping[str, float]:
        """Returns numbers of the step by constant names, to be summed in :attr:`SharedStats.sums`."""
        return {}

    def build_extensions(self, loop: Any) -> Sequence[Any]:
        """Returns the extensions that the sampler adds to a run.

        Args:
          loop: :class:`farflung.engine.TrainingLoop` of the run.

        Returns:
          Instances of :class:`farflung.engine.Extension`.
        """
        del loop
        return ()

    def report(self) -> Mapping[str, Json]:
        """Returns the sampler's figures for the summary of a run."""
        return {}

    # --- shared order of all samples, with batches that can be returned -------------------------------------------

    has_shared_order: bool = False
    """True if replicas draw from one order of the whole set, so that batches can be returned."""

    def return_batch(self, step: int, rank: int) -> None:
        """Puts the batch that a rank took at a recent step back, so that it is drawn again."""
        raise NotImplementedError

    def get_joiner_state(self) -> State:
        """Returns the state besides :meth:`state_dict` that a joiner needs to return batches."""
        return {}

    is_balanced: bool = False
    """True if fast replicas take more samples of a step; see :class:`farflung.sampling.BalancedSampler`."""
    needs_scores: bool = False
    """True if samples are scored during waits; see :class:`farflung.sampling.ScoringSampler`."""

    # --- scores that are transferred with samples -----------------------------------------------------------------

    can_transfer_scores: bool = False
    """True if the methods below are implemented.

    A slot is the number by which a replica knows a sample; the number of slots is constant. A score below 0 marks a
    sample that was never scored.
    """

    def choose_outgoing(self, count: int, step: int) -> SampleIds:
        """Returns ``count`` distinct slots whose samples are sent away at a step.

        Raises:
          ConfigError: there are fewer samples.
        """
        raise NotImplementedError

    def get_scores(self, ids: SampleIds) -> Tensor | None:
        """Returns the scores of the samples in these slots, float32; ``None`` if scores are not transferred."""
        del ids
        return None

    def set_scores(self, ids: SampleIds, scores: Tensor) -> None:  # noqa: B027
        """Sets the scores of slots whose samples were replaced, from their previous owners."""
