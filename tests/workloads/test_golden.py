"""What each workload's model is: its parameters, and the loss that it begins with."""

from __future__ import annotations

import pytest
import torch

from farflung.types import Batch
from farflung.workloads import WORKLOADS, create_workload
from tests.workloads.test_contract import OPTIONS, sample

# Parameters, and the mean loss of seed 0's model on 4 samples that are drawn from seed 1, without dropout.
# Where papers give the number for other classes, it is that plus what the last layer differs by:
#   ResNet-18 and ResNet-50 for CIFAR-10: 11,173,962 and 23,520,842.
GOLDEN: dict[str, tuple[int, float]] = {
    "cifar10/resnet18": (11_173_962, 2.32688),
    "cifar10/resnet20": (269_722, 2.23567),
    "cifar10/resnet32": (464_154, 2.24586),
    "cifar10/resnet8": (75_290, 2.28971),
    "cifar10/vgg": (356_810, 2.63980),
    "cifar100/resnet50": (23_705_252, 4.61004),
    "cifar100/resnet8": (81_140, 4.63948),
    "covtype/softmax": (385, 1.99207),
    "fashion-mnist/cnn": (105_866, 2.31052),
    "fashion-mnist/mlp": (203_530, 2.40268),
    "synthetic/quadratic": (64, 22.60860),
    "tinyshakespeare/gpt": (804_096, 4.21203),
    "tinyshakespeare/lstm": (93_409, 4.17297),
}


def test_the_table_has_every_workload() -> None:
    assert GOLDEN.keys() == WORKLOADS.keys()


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_parameters_and_first_loss(name: str) -> None:
    task = create_workload(name, **OPTIONS.get(name, {}))
    model = task.build_model(torch.Generator().manual_seed(0)).eval()
    shape, values, target, classes = sample(name)
    random = torch.Generator().manual_seed(1)
    inputs = (
        torch.randint(values, (4, *shape), generator=random)
        if values
        else torch.randn(4, *shape, generator=random)
    )
    batch = Batch(inputs, torch.randint(classes, (4, *target), generator=random))
    with torch.no_grad():
        loss = task.compute_losses(model, batch).mean().item()
    parameters, first = GOLDEN[name]
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert loss == pytest.approx(first, rel=1e-3)
