"""A small net with batch norm: resnet8 on Fashion-MNIST at 14 x 14 pixels."""

from __future__ import annotations

from functools import partial

from torch import nn

from farflung.data import fashion_mnist
from farflung.data.datasets import TensorDataset
from farflung.types import Workload
from farflung.workloads import Classification, resnet
from farflung.workloads.classification import settings

__all__ = ["resnet8"]


def resnet8() -> Workload:
    """The classes of Fashion-MNIST, of each square of four pixels their mean."""
    return Classification(
        name="fashion-mnist/small-resnet8",
        network=partial(resnet, 8, 10),
        load=_small,
        defaults=settings(batch_size=16, learning_rate=0.002, momentum=0.0, steps=400, optimizer="adam"),
    )


def _small() -> tuple[TensorDataset, TensorDataset]:
    train, test = (_halved(data) for data in fashion_mnist.load(augment=False))
    return train, test


def _halved(data: TensorDataset) -> TensorDataset:
    images = data.inputs.view(len(data), 1, 28, 28).float()
    small = nn.functional.avg_pool2d(images, 2).div_(255).sub_(0.29).div_(0.35)
    return TensorDataset(small.expand(-1, 3, -1, -1), data.targets, data.labels, origin=data.origin)
