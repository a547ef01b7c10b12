"""A gradient that is accumulated beside the batches."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from farflung.types import State

__all__ = ["AccumulatedGradient"]


class AccumulatedGradient:
    """Gradient of samples beside the batches, which the next step's mean takes in; empty by default.

    Args:
      model: has the parameters.
    """

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._sums: list[Tensor | None] = [None] * len(self._parameters)
        self.samples = 0

    def add(self, losses: Tensor) -> None:
        """Adds the gradients of losses; nothing if one of them is not finite."""
        if not bool(losses.isfinite().all()):
            return
        gradients = torch.autograd.grad(losses.sum(), self._parameters, allow_unused=True)
        for place, (before, more) in enumerate(zip(self._sums, gradients, strict=True)):
            if more is not None:
                self._sums[place] = more if before is None else before + more
        self.samples += len(losses)

    def share(self, batch: int) -> float:
        """Returns the share of a batch's loss in the mean over it and the samples held."""
        return batch / (batch + self.samples)

    def load(self, batch: int) -> None:
        """Moves the sum into the parameters' gradients, weighted for a batch of so many samples to be added."""
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
