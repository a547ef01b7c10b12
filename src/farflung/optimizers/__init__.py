"""Optimizers by name, with the settings that only some of them have."""

from collections.abc import Callable

from farflung.optimizers.adam import Adam, AdamW
from farflung.optimizers.lars import Lars
from farflung.optimizers.sgd import SGD
from farflung.types import OptimizerFactory

__all__ = ["OPTIMIZERS", "SGD", "Adam", "AdamW", "Lars"]

OPTIMIZERS: dict[str, Callable[..., OptimizerFactory]] = {
    "adam": Adam,
    "adamw": AdamW,
    "lars": Lars,
    "sgd": SGD,
}
"""All of them by name."""
