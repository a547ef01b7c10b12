"""Operations of a forward pass, against arithmetic on paper."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from farflung.data.datasets import TensorDataset
from farflung.types import Batch, Dataset, Json
from farflung.workloads import forward_flops, workload


class Sequences:
    """A recurrent layer on sequences of six."""

    name = "test/sequences"
    defaults: dict[str, Json]

    def __init__(self) -> None:
        self.defaults = {}

    def model(self, generator: torch.Generator) -> nn.Module:
        del generator
        return nn.LSTM(5, 7, batch_first=True)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        output: Tensor = model(batch.inputs)[0]
        return output.sum(dim=(1, 2))

    def metric(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.loss(model, batch)

    def datasets(self) -> tuple[Dataset, Dataset]:
        labels = torch.zeros(3, dtype=torch.int64)
        data = TensorDataset(torch.zeros(3, 6, 5), labels, labels)
        return data, data


def test_a_recurrent_layer_costs_its_products() -> None:
    """torch counts nothing for one that oneDNN computes as a whole."""
    assert forward_flops(Sequences()) == 6 * 2 * 4 * 7 * (5 + 7)


def test_a_model_without_products_costs_two_for_each_parameter() -> None:
    assert forward_flops(workload("synthetic/quadratic", dim=64)) == 128
