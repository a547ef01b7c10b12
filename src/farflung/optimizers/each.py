"""What farflung's own optimizers have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, overload

import torch
from torch import Tensor
from typing_extensions import override

__all__ = ["EachParameter"]


class EachParameter(torch.optim.Optimizer):
    """Moves each parameter that has a gradient by itself."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    @torch.no_grad()
    @override
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Makes a step, and computes the loss anew before where a closure is given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._move(parameter, parameter.grad, group)
        return loss

    @abstractmethod
    def _move(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Changes a parameter in place, by the settings of its group."""
