"""Small colour pictures: CIFAR-10, CIFAR-100."""

from __future__ import annotations

from functools import partial

from farflung.data import cifar
from farflung.types import Workload
from farflung.workloads._classification import Classification, settings
from farflung.workloads._plain import vgg
from farflung.workloads._residual import resnet

__all__ = ["resnet8", "resnet20", "resnet32", "small_vgg"]


def resnet8() -> Workload:
    """CIFAR-10 with the residual network of 8 layers.

    Test accuracy with the defaults (1,000 steps of 32, less than one epoch, seeds 0 and 1): 49.5 and 50.1 %. A linear
    model: 38.5 % after 8,000 steps.
    """
    return Classification(
        name="cifar10/resnet8",
        network=partial(resnet, 8, 10),
        load=partial(cifar.load, cifar.CIFAR10),
        defaults=settings(batch_size=32, learning_rate=0.02, weight_decay=1e-4, steps=1000),
    )


def resnet20() -> Workload:
    """CIFAR-10 with the residual network of 20 layers.

    Test accuracy with the defaults (1,000 steps of 32, less than one epoch, seed 0): 48.3 %. A linear model: 38.5 %
    after 8,000 steps. Far more epochs and a decaying learning rate are needed for the 91 % of He et al.
    """
    return Classification(
        name="cifar10/resnet20",
        network=partial(resnet, 20, 10),
        load=partial(cifar.load, cifar.CIFAR10),
        defaults=settings(batch_size=32, learning_rate=0.02, weight_decay=1e-4, steps=1000),
    )


def resnet32() -> Workload:
    """CIFAR-10 with the residual network of 32 layers, 0.46 million parameters."""
    return Classification(
        name="cifar10/resnet32",
        network=partial(resnet, 32, 10),
        load=partial(cifar.load, cifar.CIFAR10),
        defaults=settings(batch_size=32, learning_rate=0.02, weight_decay=1e-4, steps=1000),
    )


def small_vgg() -> Workload:
    """CIFAR-10 with three convolutions and two dense layers.

    Test accuracy with the defaults (800 steps of 32, half an epoch, seeds 0 and 1): 53.0 and 49.6 %. A linear model:
    38.5 % after 8,000 steps.
    """
    return Classification(
        name="cifar10/vgg",
        network=partial(vgg, (3, 32, 32), (32, None, 64, None, 128, None), 128, 10),
        load=partial(cifar.load, cifar.CIFAR10),
        defaults=settings(batch_size=32, learning_rate=0.01, weight_decay=5e-4, steps=800),
    )
