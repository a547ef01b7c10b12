"""A run that has ended holds neither models nor data in memory, so that many may run in one process."""

from __future__ import annotations

import gc
import weakref

import torch
from torch import nn
from torch.utils.data import TensorDataset

import farflung
from farflung.planning import time_recipe
from farflung.runs import SimulatedConfig


class Watched(farflung.TorchWorkload):
    """Workload that knows which parameters of its models are alive."""

    def __init__(self) -> None:
        self.parameters: list[weakref.ref[nn.Parameter]] = []
        data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
        super().__init__(lambda: nn.Linear(4, 1), data, data, nn.functional.mse_loss)

    def build_model(self, generator: torch.Generator) -> nn.Module:
        model = super().build_model(generator)
        self.parameters += map(weakref.ref, model.parameters())
        return model

    def is_freed(self) -> bool:
        gc.collect()
        return bool(self.parameters) and all(parameter() is None for parameter in self.parameters)


def test_models_of_a_simulated_run_are_freed() -> None:
    workload = Watched()
    farflung.simulate(workload, workers=3, steps=4)
    assert workload.is_freed()


def test_what_is_timed_without_arithmetic_is_freed() -> None:
    workload = Watched()
    freed = weakref.ref(workload)
    time_recipe(SimulatedConfig.resolve({"workload": workload, "steps": 4}), ["lan-1g"])
    assert workload.is_freed()
    del workload
    gc.collect()
    assert freed() is None
