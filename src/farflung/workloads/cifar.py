"""Small colour pictures: CIFAR-10, CIFAR-100."""

from __future__ import annotations

from functools import partial

from farflung.data import cifar
from farflung.types import Workload
from farflung.workloads import _residual
from farflung.workloads._classification import Classification, mercury_settings, settings
from farflung.workloads._plain import vgg
from farflung.workloads._residual import resnet

__all__ = [
    "cifar100_resnet8",
    "cifar100_resnet50",
    "resnet8",
    "resnet18",
    "resnet20",
    "resnet32",
    "small_vgg",
]


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


def resnet18() -> Workload:
    """CIFAR-10 with ResNet-18 for images of 32 x 32, 11.2 million parameters, as Mercury's paper has it.

    Training images are shifted by up to 4 pixels. For two cores there is ``cifar10/resnet8``.
    """
    return Classification(
        name="cifar10/resnet18",
        network=partial(_residual.resnet18, 10),
        load=partial(cifar.load, cifar.CIFAR10, shift=4),
        defaults=mercury_settings(batch_size=32),
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


def cifar100_resnet8() -> Workload:
    """CIFAR-100 with the residual network of 8 layers."""
    return Classification(
        name="cifar100/resnet8",
        network=partial(resnet, 8, 100),
        load=partial(cifar.load, cifar.CIFAR100),
        defaults=settings(batch_size=32, learning_rate=0.02, weight_decay=1e-4, steps=1000),
    )


def cifar100_resnet50() -> Workload:
    """CIFAR-100 with ResNet-50 for images of 32 x 32, 23.7 million parameters, as Mercury's paper has it.

    Training images are shifted by up to 4 pixels. For two cores there is ``cifar100/resnet8``.
    """
    return Classification(
        name="cifar100/resnet50",
        network=partial(_residual.resnet50, 100),
        load=partial(cifar.load, cifar.CIFAR100, shift=4),
        defaults=mercury_settings(batch_size=32),
    )
