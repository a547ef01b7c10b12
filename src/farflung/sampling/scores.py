"""Scores samples by a model: by their losses, or by a bound on the norm of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from farflung.errors import ConfigError, RunLost
from farflung.types import ScoredBy

__all__ = ["check_scores", "scores_by"]


def scores_by(
    name: str, loss: Callable[[nn.Module], Tensor], model: nn.Module, count: int, by: ScoredBy
) -> Tensor:
    """One score per sample, float32 and on the host, without a trace in the model but for its mode.

    The model is put in evaluation mode: no statistics of a batch norm move, and nothing is dropped.
    ``"gradient_bound"`` needs no backward pass through the model either: it is the norm of the gradient with respect to
    the model's output, for cross-entropy that of the probabilities less the target's, to which the norm of the whole
    gradient is bounded in proportion (Katharopoulos & Fleuret 2018, section 3.2).

    Args:
      name: of what the loss belongs to, for messages.
      loss: of each sample, by the model that it is given.
      model: the model.
      count: samples.
      by: what samples are judged by.

    Raises:
      ConfigError: a loss that is not one number per sample; for ``"gradient_bound"`` also a model whose output is no
        tensor with a row per sample, or a loss that does not depend on it.
    """
    if model.training:  # to go through all modules for every chunk takes a small model as long as scoring it
        model.eval()
    if by == "loss":
        with torch.no_grad():
            losses = _checked(name, loss(model), count)
        return losses.float().cpu()
    tap = _Tap(model)
    losses = _checked(name, loss(tap), count)
    gradient = tap.gradient(losses)
    if gradient is None or len(gradient) != count:
        raise ConfigError(
            f"{name}: scored_by='gradient_bound' needs a loss of what the model's forward returns, a row for each "
            "sample: choose scored_by='loss'"
        )
    norms: Tensor = torch.linalg.vector_norm(gradient.reshape(count, -1), dim=1)
    return norms.float().cpu()


def check_scores(name: str, scores: Tensor, step: int) -> None:
    """Checks that samples can be drawn by scores.

    Raises:
      RunLost: scores that are not finite.
      ConfigError: scores below 0.
    """
    num_nonfinite = int((~scores.isfinite()).sum())
    if num_nonfinite:
        raise RunLost(
            f"{name}: {num_nonfinite} of {len(scores)} scores at step {step} are not finite: "
            "lower the learning rate or look at the data there"
        )
    num_negative = int((scores < 0).sum())
    if num_negative:
        raise ConfigError(
            f"{name}: {num_negative} of {len(scores)} scores at step {step} are below 0, and samples cannot be drawn by "
            "them: choose scored_by='gradient_bound', or a loss that is never negative"
        )


def _checked(name: str, losses: Tensor, count: int) -> Tensor:
    if losses.shape != (count,):
        raise ConfigError(
            f"{name}: its loss of {count} samples has shape {tuple(losses.shape)}, and importance needs one number for "
            "each: leave out the reduction, or choose --sampler uniform"
        )
    return losses


class _Tap(nn.Module):
    """A model whose output is where gradients end.

    Args:
      model: the whole.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model, self.training = model, model.training
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
        gradient: Tensor | None = torch.autograd.grad(losses.sum(), self._output, allow_unused=True)[0]
        return gradient
