"""House numbers: the digits of SVHN."""

from __future__ import annotations

from functools import partial

from farflung.data import svhn
from farflung.types import Workload
from farflung.workloads import _residual
from farflung.workloads._classification import Classification, mercury_settings, settings

__all__ = ["resnet8", "resnet18"]


def resnet8() -> Workload:
    """SVHN with the residual network of 8 layers."""
    return Classification(
        name="svhn/resnet8",
        network=partial(_residual.resnet, 8, 10),
        load=svhn.load,
        defaults=settings(batch_size=32, learning_rate=0.02, weight_decay=1e-4, steps=1000),
    )


def resnet18() -> Workload:
    """SVHN with ResNet-18 for images of 32 x 32, 11.2 million parameters, as Mercury's paper has it.

    For two cores there is ``svhn/resnet8``.
    """
    return Classification(
        name="svhn/resnet18",
        network=partial(_residual.resnet18, 10),
        load=svhn.load,
        defaults=mercury_settings(batch_size=32),
    )
