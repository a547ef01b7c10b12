"""Samplers that score samples in a step's wait for exchanges."""

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
from farflung.sampling.gain import Gain, MeasuredGain
from farflung.sampling.scores import scores_by
from farflung.types import (
    PASSES,
    Batch,
    Cost,
    Decision,
    Due,
    Json,
    PoolView,
    SampleIds,
    Sampler,
    ScoredBy,
    Spare,
    State,
    Statistics,
    Workload,
)

__all__ = ["Scoring", "ScoringSampler", "scores_of", "still"]


class ScoringSampler(Sampler):
    """A sampler whose :meth:`due` names samples to score in a step's wait.

    It picks from the samples that one rank holds, so ranks hold shares of the training set; where none are asked for,
    equal random ones. Of a stream it picks from what a step is to take, and the rest stays.
    """

    needs_scores = True
    scored_by: ScoredBy = "loss"
    """What samples are judged by."""
    gain: Gain | None = None
    """Predicted speed-up by drawing by scores; ``None`` if the sampler does not measure it."""
    statistics: Statistics = "batch"
    """What running statistics are updated by, where samples are scored."""

    def due(self, view: PoolView, decide: Callable[[str, int, Callable[[], Json]], Decision]) -> Due:
        """What to do in a step's wait.

        Args:
          view: of the step.
          decide: :meth:`farflung.types.Runtime.decide_own`; whatever is chosen by time goes through it.
        """
        del view, decide
        return Due()

    def scored(self, ids: SampleIds, scores: Tensor, step: int) -> None:
        """Takes the scores of one chunk, float32, by the model as it was before the step's update."""

    def observe(self, spare: Spare) -> None:
        """Takes what the step had to spare; once a step, after its update."""

    @override
    def extensions(self, loop: TrainingLoop) -> Sequence[Extension]:
        measured = (
            () if self.gain is None else (MeasuredGain(self.gain, loop.runtime, loop.schedule, loop.reducer),)
        )
        return (Scoring(self, loop), *measured)


class Scoring(Extension):
    """Does what a sampler has due between the backward pass of a step and the merge.

    The model is that of the step, before its update; so scores are a step old when they are drawn by, and gradients
    when they are stepped on.

    Args:
      sampler: says what is due, and keeps the scores.
      loop: has samples, model and losses.
    """

    key: ClassVar[str] = "scoring"

    def __init__(self, sampler: ScoringSampler, loop: TrainingLoop) -> None:
        self._sampler, self._loop = sampler, loop
        self._spare = Spare(0.0, 0.0, 0.0, 0, overlaps=not loop.schedule.is_synchronous)

    @override
    def computing(self, step: int) -> AbstractContextManager[object]:
        is_excluded = self._loop.drawing.is_weighted and self._sampler.statistics == "uniform"
        return still(self._loop.model) if is_excluded else nullcontext()

    @override
    async def while_waiting(self, step: int) -> None:
        """Does what is due at a step, chunk by chunk."""
        compute, view = self._loop.runtime.compute, self._loop.drawing.view_of_rest(step)
        begin, count, score = self._loop.runtime.now(), 0, self._loop.scorer(self._sampler.scored_by)
        due = self._sampler.due(view, self._loop.runtime.decide_own)
        for ids in due.scores:
            scores = await compute(Cost("score", len(ids)), partial(score, ids))
            self._sampler.scored(ids, scores, view.step)
            count += len(ids)
        losses_of = self._loop.losses() if due.gradients or due.statistics else score
        for ids in due.gradients:
            losses = await compute(Cost("score", len(ids)), partial(losses_of, ids))
            await compute(Cost("backward", len(ids)), partial(self._loop.accumulated.add, losses))
            count += PASSES * len(ids)
        for ids in due.statistics:
            await compute(Cost("score", len(ids)), partial(torch.no_grad()(losses_of), ids))
            count += len(ids)
        self._spare = replace(self._spare, scoring_s=self._loop.runtime.now() - begin, scored=count)

    @override
    async def after_step(self, result: StepResult) -> None:
        """Tells the sampler what the step has left for scoring."""
        wait_s = max(0.0, result.waited_s)
        self._sampler.observe(replace(self._spare, compute_s=result.compute_s, wait_s=wait_s))

    @override
    def state_dict(self) -> State:
        return self._loop.accumulated.state_dict()

    @override
    def load_state_dict(self, state: State) -> None:
        self._loop.accumulated.load_state_dict(state)


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Inside, no forward pass moves the running statistics of a batch norm."""
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


def scores_of(workload: Workload, model: nn.Module, batch: Batch, by: ScoredBy) -> Tensor:
    """One score for each sample of a workload's batch; see :func:`farflung.sampling.scores.scores_by`."""
    return scores_by(
        f"workload {workload.name}", lambda tapped: workload.loss(tapped, batch), model, len(batch), by
    )
