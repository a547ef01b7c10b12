"""Spends a replica's waits for its exchanges: on scores, on further gradients, on running statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from farflung.sampling.scores import scores_by
from farflung.types import (
    PASSES,
    Batch,
    Cost,
    PoolView,
    Runtime,
    SampleIds,
    Sampler,
    ScoredBy,
    Spare,
    State,
    Workload,
)

__all__ = ["Filled", "Scoring", "scores_of", "still"]


class Filled:
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

    def give(self, batch: int) -> None:
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


@dataclass(slots=True)
class Scoring:
    """What a step does between its backward pass and the merge, where its sampler has something due.

    The model is that of the step, before its update; so scores are a step old when they are drawn by, and gradients
    when they are stepped on.

    Args:
      runtime: the world.
      sampler: says what is due, and keeps the scores.
      scorer: of a step: scores some samples by the replica's model.
      losses: of a step: the losses of some samples, as in training.
      filled: takes gradients.
      overlaps: whether exchanges go on beside computing.
    """

    runtime: Runtime
    sampler: Sampler
    scorer: Callable[[], Callable[[SampleIds], Tensor]]
    losses: Callable[[], Callable[[SampleIds], Tensor]]
    filled: Filled
    overlaps: bool

    async def meanwhile(self, view: PoolView) -> Spare:
        """Does what is due at a step, chunk by chunk.

        Returns:
          What that took; the rest of the step is not known yet.
        """
        compute = self.runtime.compute
        begin, count, score = self.runtime.now(), 0, self.scorer()
        due = self.sampler.due(view, self.runtime.decide_own)
        for ids in due.scores:
            scores = await compute(Cost("score", len(ids)), partial(score, ids))
            self.sampler.scored(ids, scores, view.step)
            count += len(ids)
        losses_of = self.losses() if due.gradients or due.statistics else score
        for ids in due.gradients:
            losses = await compute(Cost("score", len(ids)), partial(losses_of, ids))
            await compute(Cost("backward", len(ids)), partial(self.filled.add, losses))
            count += PASSES * len(ids)
        for ids in due.statistics:
            await compute(Cost("score", len(ids)), partial(torch.no_grad()(losses_of), ids))
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
