"""Optimizers by name, with the settings that only some of them have."""

from collections.abc import Callable

from farflung.optimizers.adam import Adam, AdamW
from farflung.optimizers.lars import Lars
from farflung.optimizers.sgd import SGD
from farflung.optimizers.sign_sgd import SignSGD
from farflung.types import OptimizerFactory

__all__ = ["OPTIMIZERS", "SGD", "Adam", "AdamW", "Lars", "SignSGD"]

OPTIMIZERS: dict[str, Callable[..., OptimizerFactory]] = {
    "adam": Adam,
    "adamw": AdamW,
    "lars": Lars,
    "sgd": SGD,
    "sign_sgd": SignSGD,
}
"""All of them by name."""
