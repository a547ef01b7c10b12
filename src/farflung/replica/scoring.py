"""Scores samples while a replica waits for its exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor, nn

from farflung.sampling.scores import scores_by
from farflung.types import Batch, Cost, PoolView, Runtime, SampleIds, ScoredBy, Scores, Spare, Workload

__all__ = ["Scoring", "scores_of"]


@dataclass(slots=True)
class Scoring:
    """What a step does between its backward pass and the merge, where its sampler scores samples.

    The model is that of the step, before its update; so scores are a step old when they are drawn by.

    Args:
      runtime: the world.
      sampler: says what is due, and keeps the scores.
      scorer: of a step: scores some samples by the replica's model.
      overlaps: whether exchanges go on beside computing.
    """

    runtime: Runtime
    sampler: Scores
    scorer: Callable[[], Callable[[SampleIds], Tensor]]
    overlaps: bool

    async def meanwhile(self, view: PoolView) -> Spare:
        """Scores what is due at a step, chunk by chunk.

        Returns:
          What that took; the rest of the step is not known yet.
        """
        begin, count, score = self.runtime.now(), 0, self.scorer()
        for ids in self.sampler.due(view, self.runtime.decide_own):
            scores = await self.runtime.compute(Cost("score", len(ids)), lambda ids=ids: score(ids))  # type: ignore[misc]
            self.sampler.scored(ids, scores, view.step)
            count += len(ids)
        return Spare(0.0, 0.0, self.runtime.now() - begin, count, self.overlaps)

    def observe(self, spare: Spare, *, compute_s: float, wait_s: float) -> None:
        """Tells the sampler what the step has left for scoring.

        Args:
          spare: from :meth:`meanwhile`.
          compute_s: seconds of the forward and backward pass.
          wait_s: seconds from the end of the backward pass until all exchanges were there.
        """
        self.sampler.observe(replace(spare, compute_s=compute_s, wait_s=max(0.0, wait_s)))


def scores_of(workload: Workload, model: nn.Module, batch: Batch, by: ScoredBy) -> Tensor:
    """One score for each sample of a workload's batch; see :func:`farflung.sampling.scores.scores_by`."""
    return scores_by(
        f"workload {workload.name}", lambda tapped: workload.loss(tapped, batch), model, len(batch), by
    )
