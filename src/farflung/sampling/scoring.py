"""Samplers that score samples while a step waits for exchanges."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from farflung.engine import Extension, StepResult, TrainingLoop
from farflung.sampling.gain import Gain, GainExtension
from farflung.sampling.scores import compute_scores
from farflung.types import (
    FORWARDS_PER_GRADIENT,
    Batch,
    Cost,
    Decision,
    DrawContext,
    Json,
    SampleIds,
    Sampler,
    ScoreKind,
    ScoringTimes,
    State,
    StatisticsSource,
    WaitWork,
    Workload,
)

__all__ = ["ScoringExtension", "ScoringSampler", "freeze_batch_norm", "score_batch"]


class ScoringSampler(Sampler):
    """Sampler whose :meth:`plan_wait` names samples to score while a step waits.

    It picks from the samples that one rank holds, so ranks hold shares of the training set, by default equal random
    ones. From a stream it picks among the samples of the step.
    """

    needs_scores = True
    scored_by: ScoreKind = "loss"
    """Kind of score."""
    gain: Gain | None = None
    """Predicted speed-up by drawing by scores; None if the sampler does not measure it."""
    statistics: StatisticsSource = "batch"
    """Source of running statistics, for samplers that score."""

    def plan_wait(
        self, context: DrawContext, decide: Callable[[str, int, Callable[[], Json]], Decision]
    ) -> WaitWork:
        """Plans the work of a step's wait; by default none.

        Args:
          context: Samples and sizes of the step.
          decide: :meth:`farflung.types.Runtime.decide_locally`, for choices that depend on time.
        """
        del context, decide
        return WaitWork()

    def record_scores(self, ids: SampleIds, scores: Tensor, step: int) -> None:
        """Records the scores of one chunk, float32, computed before the step's update."""

    def record_times(self, times: ScoringTimes) -> None:
        """Records the times of a step; called once a step, after its update."""

    @override
    def build_extensions(self, loop: TrainingLoop) -> Sequence[Extension]:
        measured = (
            ()
            if self.gain is None
            else (GainExtension(self.gain, loop.runtime, loop.schedule, loop.reducer),)
        )
        return (ScoringExtension(self, loop), *measured)


class ScoringExtension(Extension):
    """Extension that does the planned work of a sampler between the backward pass of a step and the merge.

    The model is that of the step, before its update. So scores and gradients are one step old when they are used.

    Args:
      sampler: Sampler that plans the work and keeps the scores.
      loop: Training loop with samples, model and losses.
    """

    key: ClassVar[str] = "scoring"

    def __init__(self, sampler: ScoringSampler, loop: TrainingLoop) -> None:
        self._sampler, self._loop = sampler, loop
        self._times = ScoringTimes(0.0, 0.0, 0.0, 0, has_overlap=not loop.schedule.is_synchronous)

    @override
    def compute_context(self, step: int) -> AbstractContextManager[object]:
        is_excluded = self._loop.batch_loader.is_weighted and self._sampler.statistics == "uniform"
        return freeze_batch_norm(self._loop.model) if is_excluded else nullcontext()

    @override
    async def use_wait(self, step: int) -> None:
        """Does the work planned for a step, chunk by chunk."""
        compute, context = self._loop.runtime.compute, self._loop.batch_loader.build_wait_context(step)
        begin = self._loop.runtime.read_clock()
        count = 0
        score = self._loop.build_scorer(self._sampler.scored_by)
        due = self._sampler.plan_wait(context, self._loop.runtime.decide_locally)
        for ids in due.scores:
            scores = await compute(Cost("score", len(ids)), partial(score, ids))
            self._sampler.record_scores(ids, scores, context.step)
            count += len(ids)
        losses_of = self._loop.build_loss_fn() if due.gradients or due.statistics else score
        for ids in due.gradients:
            losses = await compute(Cost("score", len(ids)), partial(losses_of, ids))
            await compute(Cost("backward", len(ids)), partial(self._loop.accumulated_gradient.add, losses))
            count += FORWARDS_PER_GRADIENT * len(ids)
        for ids in due.statistics:
            await compute(Cost("score", len(ids)), partial(torch.no_grad()(losses_of), ids))
            count += len(ids)
        self._times = replace(
            self._times, scoring_s=self._loop.runtime.read_clock() - begin, num_scored=count
        )

    @override
    async def finish_step(self, result: StepResult) -> None:
        """Passes the times of the step to the sampler."""
        wait_s = max(0.0, result.waited_s)
        self._sampler.record_times(replace(self._times, compute_s=result.compute_s, wait_s=wait_s))

    @override
    def state_dict(self) -> State:
        return self._loop.accumulated_gradient.state_dict()

    @override
    def load_state_dict(self, state: State) -> None:
        self._loop.accumulated_gradient.load_state_dict(state)


@contextmanager
def freeze_batch_norm(model: nn.Module) -> Iterator[None]:
    """Keeps the running statistics of batch norms unchanged inside the context."""
    norms = [norm for norm in model.modules() if isinstance(norm, _BatchNorm) and norm.track_running_stats]
    saved = [
        (norm, norm.momentum, None if (n := norm.num_batches_tracked) is None else n.clone())
        for norm in norms
    ]
    for norm in norms:
        norm.momentum = 0.0
    try:
        yield
    finally:
        for norm, momentum, counted in saved:
            norm.momentum = momentum
            if counted is not None and norm.num_batches_tracked is not None:
                norm.num_batches_tracked.copy_(counted)


def score_batch(workload: Workload, model: nn.Module, batch: Batch, kind: ScoreKind) -> Tensor:
    """Computes one score for each sample of a workload's batch; see :func:`farflung.sampling.scores.compute_scores`."""
    return compute_scores(
        f"workload {workload.name}",
        lambda wrapped: workload.compute_losses(wrapped, batch),
        model,
        len(batch),
        kind,
    )
