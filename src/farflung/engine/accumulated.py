"""Gradient accumulated from samples outside the batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from farflung.types import State

__all__ = ["AccumulatedGradient"]


class AccumulatedGradient:
    """Gradient of samples outside the batches, which is added to the next step's mean; initially empty.

    Args:
      model: Model with the parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sums: list[Tensor | None] = [None] * len(self._parameters)
        self.num_samples = 0

    def add(self, losses: Tensor) -> None:
        """Adds the gradients of losses, unless one of them is not finite."""
        if not bool(losses.isfinite().all()):
            return
        gradients = torch.autograd.grad(losses.sum(), self._parameters, allow_unused=True)
        for place, (total, gradient) in enumerate(zip(self._sums, gradients, strict=True)):
            if gradient is not None:
                self._sums[place] = gradient if total is None else total + gradient
        self.num_samples += len(losses)

    def compute_share(self, batch_size: int) -> float:
        """Returns the weight of a batch's loss in the mean over the batch and the accumulated samples."""
        return batch_size / (batch_size + self.num_samples)

    def load_gradients(self, batch_size: int) -> None:
        """Moves the sum into the parameters' gradients, divided by the number of its samples plus ``batch_size``.

        The caller scales the batch's loss by :meth:`compute_share`.
        """
        if not self.num_samples:
            return
        for parameter, gradient_sum in zip(self._parameters, self._sums, strict=True):
            if gradient_sum is not None:
                parameter.grad = gradient_sum / (batch_size + self.num_samples)
        self._sums, self.num_samples = [None] * len(self._parameters), 0

    def state_dict(self) -> State:
        sums = {str(place): tensor for place, tensor in enumerate(self._sums) if tensor is not None}
        return {"samples": self.num_samples, "sums": sums} if self.num_samples else {}

    def load_state_dict(self, state: State) -> None:
        """Restores :meth:`state_dict`; an empty state clears the sum."""
        self.num_samples, sums = state.get("samples", 0), state.get("sums", {})
        self._sums = [
            sums[str(place)].to(p.device) if str(place) in sums else None
            for place, p in enumerate(self._parameters)
        ]
