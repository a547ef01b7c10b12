"""Small colour pictures: CIFAR-10, CIFAR-100."""

from __future__ import annotations

from functools import partial

from farflung.data import cifar
from farflung.types import Workload
from farflung.workloads._classification import Classification, settings
from farflung.workloads._plain import vgg
from farflung.workloads._residual import resnet

__all__ = ["resnet8", "resnet20", "small_vgg"]


def resnet8() -> Workload:
    """CIFAR-10 with the residual network of 8 layers."""
    return Classification(
        name="cifar10/resnet8",
        network=partial(resnet, 8, 10),
        load=partial(cifar.load, cifar.CIFAR10),
        defaults=settings(batch_size=32, learning_rate=0.02, weight_decay=1e-4, steps=1000),
    )


def resnet20() -> Workload:
    """CIFAR-10 with the residual network of 20 layers."""
    return Classification(
        name="cifar10/resnet20",
        network=partial(resnet, 20, 10),
        load=partial(cifar.load, cifar.CIFAR10),
        defaults=settings(batch_size=32, learning_rate=0.02, weight_decay=1e-4, steps=1000),
    )


def small_vgg() -> Workload:
    """CIFAR-10 with three convolutions and two dense layers."""
    return Classification(
        name="cifar10/vgg",
        network=partial(vgg, (3, 32, 32), (32, None, 64, None, 128, None), 128, 10),
        load=partial(cifar.load, cifar.CIFAR10),
        defaults=settings(batch_size=32, learning_rate=0.01, weight_decay=5e-4, steps=1000),
    )
