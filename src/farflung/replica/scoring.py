"""Scores samples while a replica waits for its exchanges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from farflung.errors import ConfigError
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
    """One score per sample, float32 and on the host, without a trace in the model.

    The model is in evaluation mode: no statistics of a batch norm move, and nothing is dropped. ``"gradient_bound"``
    needs no backward pass through the model either: it is the norm of the gradient with respect to the model's output,
    for cross-entropy that of the probabilities less the target's, to which the norm of the whole gradient is bounded in
    proportion (Katharopoulos & Fleuret 2018, section 3.2).

    Raises:
      ConfigError: a loss that is not one number per sample; for ``"gradient_bound"`` also a model whose output is no
        tensor with a row per sample, or a loss that does not depend on it.
    """
    if model.training:  # to go through all modules for every chunk takes a small model as long as scoring it
        model.eval()
    if by == "loss":
        with torch.no_grad():
            losses = _checked(workload, workload.loss(model, batch), batch)
        return losses.float().cpu()
    tap = _Tap(model)
    losses = _checked(workload, workload.loss(tap, batch), batch)
    gradient = tap.gradient(losses)
    if gradient is None or len(gradient) != len(batch):
        raise ConfigError(
            f"workload {workload.name}: scored_by='gradient_bound' needs a loss of what the model's forward returns, a "
            "row for each sample: choose scored_by='loss'"
        )
    norms: Tensor = torch.linalg.vector_norm(gradient.reshape(len(batch), -1), dim=1)
    return norms.float().cpu()


def _checked(workload: Workload, losses: Tensor, batch: Batch) -> Tensor:
    if losses.shape != (len(batch),):
        raise ConfigError(
            f"workload {workload.name}: its loss of {len(batch)} samples has shape {tuple(losses.shape)}, and "
            "importance needs one number for each: leave out the reduction, or choose --sampler uniform"
        )
    return losses


class _Tap(nn.Module):
    """A model whose output is where gradients end.

    Args:
      model: the whole.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self._output: Tensor | None = None

    @override
    def forward(self, *inputs: Any) -> Any:
        with torch.no_grad():
            output: Any = self._model(*inputs)
        if isinstance(output, Tensor) and output.is_floating_point():
            self._output = output = output.detach().requires_grad_()
        return output

    def gradient(self, losses: Tensor) -> Tensor | None:
        """Of the sum of losses with respect to the output; ``None`` where there is none."""
        if self._output is None or not losses.requires_grad:
            return None
        found: Tensor | None = torch.autograd.grad(losses.sum(), self._output, allow_unused=True)[0]
        return found
