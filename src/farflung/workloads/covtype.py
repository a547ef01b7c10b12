"""What grows there: a convex problem with a natural uneven split."""

from __future__ import annotations

from torch import nn

from farflung.data import covtype
from farflung.types import Workload
from farflung.workloads._classification import Classification, settings

__all__ = ["softmax"]


def softmax() -> Workload:
    """Covertype with softmax regression: one dense layer, convex.

    Test accuracy with the defaults (1,000 steps of 64, seed 0): 71.0 %.
    """
    return Classification(
        name="covtype/softmax",
        network=lambda: nn.Linear(54, 7),
        load=covtype.load,
        defaults=settings(batch_size=64, learning_rate=0.05, weight_decay=0.0, steps=1000),
    )
