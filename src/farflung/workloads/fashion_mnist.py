"""Clothing in grey images of 28 x 28: a small CNN and a multilayer perceptron."""

from __future__ import annotations

from functools import partial

from torch import nn

from farflung.data import fashion_mnist
from farflung.data.source import Which
from farflung.types import Workload
from farflung.workloads._classification import Classification, settings

__all__ = ["cnn", "mlp"]


def cnn(data: Which = "auto") -> Workload:
    """Two convolutions and two dense layers with dropout; training images are mirrored at random.

    Test accuracy with the defaults (one replica, 4,000 steps of 32, constant learning rate, seeds 0 to 2): 88.9, 88.1
    and 89.1 % on the full set; after 3,000 steps 86.9, 86.4 and 86.8 % on the packaged subset. One replica
    with batches of 128 at learning rate 0.04 reaches 89.1 % on the full set in 1,000 steps (seed 0).
    A linear model: 81.1 % and 80.7 %.

    Args:
      data: ``packaged`` for the subset in the package, ``full`` for the official set, ``auto`` for the official
        set where it is at hand.
    """
    return Classification(
        name="fashion-mnist/cnn",
        network=_cnn,
        load=partial(fashion_mnist.load, data),
        defaults=settings(batch_size=32, learning_rate=0.01, momentum=0.9, weight_decay=1e-4, steps=4000),
    )


def mlp(data: Which = "auto") -> Workload:
    """784-256-10 with ReLU, without augmentation.

    Test accuracy with the defaults (3,000 steps of 32, seed 0): 85.1 % on the full set.

    Args:
      data: as for :func:`cnn`.
    """
    return Classification(
        name="fashion-mnist/mlp",
        network=_mlp,
        load=partial(fashion_mnist.load, data, augment=False),
        defaults=settings(batch_size=32, learning_rate=0.01, momentum=0.9, weight_decay=1e-4, steps=3000),
    )


def _cnn() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.1),
        nn.Linear(32 * 7 * 7, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 10))
