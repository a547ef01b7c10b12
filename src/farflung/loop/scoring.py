"""Spends a replica's waits for its exchanges: on scores, on further gradients, on running statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from typing_extensions import override

from farflung.engine.extension import Extension, StepResult
from farflung.loop.drawing import Drawing
from farflung.sampling.scores import scores_by
from farflung.types import (
    PASSES,
    Batch,
    Cost,
    Runtime,
    SampleIds,
    Sampler,
    ScoredBy,
    Spare,
    State,
    Workload,
)

__all__ = ["AccumulatedGradient", "Scoring", "scores_of", "still"]


class AccumulatedGradient:
    """The mean gradient of samples that filled a wait, which the next step's gradient takes in.

    Args:
      model: whose parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sums: list[Tensor | None] = [None] * len(self._parameters)
        self.samples = 0

    def add(self, losses: Tensor) -> None:
        """Adds the gradients of some losses; nothing where one of them is not finite."""
        if not bool(losses.isfinite().all()):
            return
        found = torch.autograd.grad(losses.sum(), self._parameters, allow_unused=True)
        for place, (before, more) in enumerate(zip(self._sums, found, strict=True)):
            if more is not None:
                self._sums[place] = more if before is None else before + more
        self.samples += len(losses)

    def share(self, batch: int) -> float:
        """Of a batch's loss in the mean over it and the samples held."""
        return batch / (batch + self.samples)

    def load(self, batch: int) -> None:
        """Puts what is held in the parameters' gradients, weighted for a batch of so many samples to be added."""
        if not self.samples:
            return
        for parameter, each in zip(self._parameters, self._sums, strict=True):
            if each is not None:
                parameter.grad = each / (batch + self.samples)
        self._sums, self.samples = [None] * len(self._parameters), 0

    def state_dict(self) -> State:
        sums = {str(place): each for place, each in enumerate(self._sums) if each is not None}
        return {"samples": self.samples, "sums": sums} if self.samples else {}

    def load_state_dict(self, state: State) -> None:
        """Continues from :meth:`state_dict`; of an empty state nothing is held."""
        self.samples, sums = state.get("samples", 0), state.get("sums", {})
        self._sums = [
            sums[str(place)].to(p.device) if str(place) in sums else None
            for place, p in enumerate(self._parameters)
        ]


class Scoring(Extension):
    """What a step does between its backward pass and the merge, where its sampler has something due.

    The model is that of the step, before its update; so scores are a step old when they are drawn by, and gradients
    when they are stepped on.

    Args:
      runtime: the world.
      sampler: says what is due, and keeps the scores.
      drawing: of the step's samples.
      model: of the replica.
      scorer: of a step: scores some samples by the replica's model.
      losses: of a step: the losses of some samples, as in training.
      accumulated: takes gradients.
      overlaps: whether exchanges go on beside computing.
    """

    key: ClassVar[str] = "scoring"

    def __init__(
        self,
        runtime: Runtime,
        sampler: Sampler,
        drawing: Drawing,
        model: nn.Module,
        scorer: Callable[[], Callable[[SampleIds], Tensor]],
        losses: Callable[[], Callable[[SampleIds], Tensor]],
        accumulated: AccumulatedGradient,
        *,
        overlaps: bool,
    ) -> None:
        self._runtime, self._sampler, self._drawing, self._model = runtime, sampler, drawing, model
        self._scorer, self._losses, self._accumulated, self._overlaps = scorer, losses, accumulated, overlaps
        self._spare = Spare(0.0, 0.0, 0.0, 0, overlaps)

    @override
    def computing(self, step: int) -> AbstractContextManager[object]:
        is_excluded = self._drawing.is_weighted and self._sampler.statistics == "uniform"
        return still(self._model) if is_excluded else nullcontext()

    @override
    async def while_waiting(self, step: int) -> None:
        """Does what is due at a step, chunk by chunk."""
        compute, view = self._runtime.compute, self._drawing.view_of_rest(step)
        begin, count, score = self._runtime.now(), 0, self._scorer()
        due = self._sampler.due(view, self._runtime.decide_own)
        for ids in due.scores:
            scores = await compute(Cost("score", len(ids)), partial(score, ids))
            self._sampler.scored(ids, scores, view.step)
            count += len(ids)
        losses_of = self._losses() if due.gradients or due.statistics else score
        for ids in due.gradients:
            losses = await compute(Cost("score", len(ids)), partial(losses_of, ids))
            await compute(Cost("backward", len(ids)), partial(self._accumulated.add, losses))
            count += PASSES * len(ids)
        for ids in due.statistics:
            await compute(Cost("score", len(ids)), partial(torch.no_grad()(losses_of), ids))
            count += len(ids)
        self._spare = Spare(0.0, 0.0, self._runtime.now() - begin, count, self._overlaps)

    @override
    async def after_step(self, result: StepResult) -> None:
        """Tells the sampler what the step has left for scoring."""
        wait_s = max(0.0, result.waited_s)
        self._sampler.observe(replace(self._spare, compute_s=result.compute_s, wait_s=wait_s))

    @override
    def state_dict(self) -> State:
        return self._accumulated.state_dict()

    @override
    def load_state_dict(self, state: State) -> None:
        self._accumulated.load_state_dict(state)


@contextmanager
def still(model: nn.Module) -> Iterator[None]:
    """Inside, no forward pass moves the running statistics of a batch norm."""
    norms = [each for each in model.modules() if isinstance(each, _BatchNorm) and each.track_running_stats]
    kept = [
        (each, each.momentum, None if (n := each.num_batches_tracked) is None else n.clone())
        for each in norms
    ]
    for each in norms:
        each.momentum = 0.0
    try:
        yield
    finally:
        for each, momentum, counted in kept:
            each.momentum = momentum
            if counted is not None and each.num_batches_tracked is not None:
                each.num_batches_tracked.copy_(counted)


def scores_of(workload: Workload, model: nn.Module, batch: Batch, by: ScoredBy) -> Tensor:
    """One score for each sample of a workload's batch; see :func:`farflung.sampling.scores.scores_by`."""
    return scores_by(
        f"workload {workload.name}", lambda tapped: workload.loss(tapped, batch), model, len(batch), by
    )
