"""Scores of samples by a model: their losses, or a bound on the norm of their gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from farflung.errors import ConfigError, RunLost
from farflung.types import ScoreKind

__all__ = ["check_scores", "compute_scores"]


def compute_scores(
    name: str, loss: Callable[[nn.Module], Tensor], model: nn.Module, count: int, kind: ScoreKind
) -> Tensor:
    """Computes one score per sample, float32 on the host; changes nothing in the model but its mode.

    The model is put in evaluation mode, so batch norms keep their statistics and dropout is off.
    ``"gradient_bound"`` needs no backward pass through the model: it is the norm of the gradient with respect to the
    model's output, for cross-entropy that of the probabilities less the target's. It bounds the norm of the whole
    gradient up to a factor (Katharopoulos & Fleuret 2018, section 3.2).

    Args:
      name: Owner of the loss for messages.
      loss: Function that computes the loss of each sample by the given model.
      model: Model to score by.
      count: Number of samples.
      kind: Kind of score.

    Raises:
      ConfigError: The loss is not one number per sample. For ``"gradient_bound"`` also: the model's output is no
        tensor with a row per sample, or the loss does not depend on it.
    """
    if model.training:  # visiting all modules for every chunk takes as long as scoring a small model
        model.eval()
    if kind == "loss":
        with torch.no_grad():
            losses = _require_losses_per_sample(name, loss(model), count)
        return losses.float().cpu()
    tap = _OutputTap(model)
    losses = _require_losses_per_sample(name, loss(tap), count)
    gradient = tap.compute_gradient(losses)
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
      RunLost: Scores are not finite.
      ConfigError: Scores are below 0.
    """
    num_nonfinite = int((~scores.isfinite()).sum())
    if num_nonfinite:
        raise RunLost(
            f"{name}: {num_nonfinite} of {len(scores)} scores at step {step} are not finite: "
            "lower the learning rate or look at the data there"
        )
    num_below = int((scores < 0).sum())
    if num_below:
        raise ConfigError(
            f"{name}: {num_below} of {len(scores)} scores at step {step} are below 0, and samples cannot be drawn by "
            "them: choose scored_by='gradient_bound', or a loss that is never negative"
        )


def _require_losses_per_sample(name: str, losses: Tensor, count: int) -> Tensor:
    if losses.shape != (count,):
        raise ConfigError(
            f"{name}: its loss of {count} samples has shape {tuple(losses.shape)}, and importance needs one number for "
            "each: leave out the reduction, or choose --sampler uniform"
        )
    return losses


class _OutputTap(nn.Module):
    """Model whose output has no graph behind it, so that backward passes end there.

    Args:
      model: Model to wrap.
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

    def compute_gradient(self, losses: Tensor) -> Tensor | None:
        """Computes the gradient of the summed losses with respect to the output; None if there is none."""
        if self._output is None or not losses.requires_grad:
            return None
        gradient: Tensor | None = torch.autograd.grad(losses.sum(), self._output, allow_unused=True)[0]
        return gradient
