"""Pictures of half the width and height, each pixel the mean of four, and networks small enough to learn them soon."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from farflung.data import Subset, cifar, fashion_mnist
from farflung.data.datasets import TensorDataset
from farflung.seeding import create_generator
from farflung.types import Dataset, SampleIds, Workload
from farflung.workloads import Classification
from farflung.workloads.classification import build_settings
from farflung.workloads.models import resnet

__all__ = [
    "cifar10",
    "fashion",
    "fashion_long_tail",
    "fashion_noisy",
    "fashion_resnet",
    "some",
    "with_tail",
]

TAIL = 0.01
"""Samples of the rarest class over those of the first."""
WRONG = 0.2
"""The share of the training labels that are drawn at random."""
FEWER = 20_000
"""Training samples of CIFAR-10, so that a narrow network learns nearly all of them."""
_DEFAULTS = build_settings(batch_size=32, learning_rate=0.001, momentum=0.0, steps=2000, optimizer="adam")


def fashion() -> Workload:
    """Fashion-MNIST at 14 x 14, 196-128-10 with ReLU."""
    return _fashion("fashion-mnist/14x14", lambda train: train)


def fashion_long_tail() -> Workload:
    """The same with training classes of 6,000 to 60 samples."""
    return _fashion("fashion-mnist/14x14, long tail", lambda train: Subset(train, with_tail(train, TAIL)))


def fashion_noisy() -> Workload:
    """The same with a fifth of the training labels drawn at random from all ten."""
    return _fashion("fashion-mnist/14x14, noisy", _noisy)


def fashion_resnet() -> Workload:
    """Fashion-MNIST at 14 x 14 with the residual network of 8 layers, which has batch norm."""
    return Classification("fashion-mnist/14x14, resnet8", _narrow, _in_colour, _DEFAULTS)


def cifar10() -> Workload:
    """20,000 training samples of CIFAR-10 at 16 x 16, as they are, with the residual network of 8 layers."""
    return Classification("cifar10/16x16", _narrow, _cifar10, _DEFAULTS)


def with_tail(train: Dataset, tail: float) -> SampleIds:
    """Of the first class all samples, of the last ``tail`` times as many; at random, in their order."""
    labels = train.take(torch.arange(len(train)), train=False).targets
    order, classes = some(len(train), len(train), "tail"), int(labels.max()) + 1
    kept = []
    for label in range(classes):
        members = order[labels[order] == label]
        kept.append(members[: max(1, round(len(members) * tail ** (label / (classes - 1))))])
    return torch.cat(kept).sort().values


def some(of: int, count: int, name: str) -> SampleIds:
    """``count`` different samples of so many, the same ones for each name."""
    return torch.randperm(of, generator=create_generator(0, name))[:count]


def _fashion(name: str, change: Callable[[TensorDataset], Dataset]) -> Workload:
    def load() -> tuple[Dataset, Dataset]:
        train, test = fashion_mnist.load(augment=False)
        return change(_halved(train)), _halved(test)

    return Classification(name, _dense, load, _DEFAULTS)


def _in_colour() -> tuple[Dataset, Dataset]:
    """In three equal channels."""
    train, test = map(_halved, fashion_mnist.load(augment=False))
    for data in (train, test):
        data.inputs = data.inputs.expand(-1, 3, -1, -1)
    return train, test


def _cifar10() -> tuple[Dataset, Dataset]:
    train, test = map(_halved, cifar.load(cifar.CIFAR10))
    return Subset(train, some(len(train), FEWER, "fewer")), test


def _halved(data: TensorDataset) -> TensorDataset:
    """Without augmentation."""
    pixels = nn.functional.avg_pool2d(data.inputs.float(), 2).round().to(torch.uint8)
    return TensorDataset(pixels, data.targets, data.labels, data.transform, origin=data.origin)


def _noisy(data: TensorDataset) -> TensorDataset:
    wrong = some(len(data), round(WRONG * len(data)), "wrong")
    targets = data.targets.clone()
    targets[wrong] = torch.randint(10, wrong.shape, generator=create_generator(0, "labels"))
    return TensorDataset(data.inputs, targets, targets, data.transform, origin=data.origin)


def _dense() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(196, 128), nn.ReLU(), nn.Linear(128, 10))


def _narrow() -> nn.Module:
    made: nn.Module = resnet(8, 10)
    return made.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]
