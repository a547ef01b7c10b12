"""A workload whose steps take as long as on a device, without its arithmetic, for exchanges of large models."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

from benchmarks.workloads.news import NewsgroupsGPT
from farflung.types import Batch, Dataset
from farflung.workloads import create_workload

__all__ = ["STEP_S", "Paced"]

STEP_S = 0.25
"""Computing of a step, about that of a GPU: a third forward, two thirds backward."""


@dataclass
class Paced(NewsgroupsGPT):
    """Has the parameters of a GPT; processes sleep in place of its passes, and its gradients are random numbers."""

    @override
    def load_datasets(self) -> tuple[Dataset, Dataset]:
        return create_workload("synthetic/quadratic").load_datasets()

    @override
    def compute_losses(self, model: nn.Module, batch: Batch) -> Tensor:
        losses: Tensor = model(batch.inputs)
        return losses

    @override
    def _build_network(self) -> nn.Module:
        return _PacedModel(super()._build_network())


class _PacedModel(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.weights = nn.ParameterList(model.parameters())
        self.gradients = [torch.randn_like(weight) for weight in self.weights]

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        """Returns zero; its backward pass comes to each weight when a device would, the last ones first."""
        begin_s, loss = time.monotonic(), torch.zeros(())
        total, before = sum(gradient.numel() for gradient in self.gradients), 0
        for weight, gradient in zip(self.weights, self.gradients, strict=True):
            ready_s = begin_s + STEP_S * (1 - 2 / 3 * before / total)
            loss = _Layer.apply(loss, weight, gradient, ready_s)  # type: ignore[no-untyped-call]
            before += gradient.numel()
        _sleep_until(begin_s + STEP_S / 3)
        return loss


class _Layer(torch.autograd.Function):
    """Returns the loss before it as its own."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, weight: Tensor, gradient: Tensor, ready_s: float) -> Tensor:
        ctx.gradient, ctx.ready_s = gradient, ready_s
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor) -> tuple[Tensor, Tensor, None, None]:
        _sleep_until(ctx.ready_s)
        return of_loss, ctx.gradient, None, None


def _sleep_until(moment_s: float) -> None:
    time.sleep(max(0.0, moment_s - time.monotonic()))
