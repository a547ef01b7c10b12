"""What a place is, seen from the air."""

from __future__ import annotations

from functools import partial

from farflung.data import aid
from farflung.types import Workload
from farflung.workloads import _inverted
from farflung.workloads._classification import Classification, mercury_settings, settings

__all__ = ["mobilenet", "mobilenetv2"]


def mobilenet() -> Workload:
    """AID at 64 x 64 with a small MobileNetV2.

    Test accuracy with the defaults (1,000 steps of 32, four epochs, seed 0): 54.6 % of 30 classes. A linear model:
    25.8 % after 2,000 steps.
    """
    return Classification(
        name="aid/mobilenet",
        network=partial(_inverted.mobilenet, 30),
        load=aid.load,
        defaults=settings(batch_size=32, learning_rate=0.03, weight_decay=1e-4, steps=1000),
    )


def mobilenetv2() -> Workload:
    """AID at 64 x 64 with MobileNetV2, 2.3 million parameters, as Mercury's paper has it.

    The paper does not say how large its pictures are. For two cores there is ``aid/mobilenet``.
    """
    return Classification(
        name="aid/mobilenetv2",
        network=partial(_inverted.mobilenetv2, 30),
        load=aid.load,
        defaults=mercury_settings(batch_size=32),
    )
