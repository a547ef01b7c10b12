"""Optimizers: farflung's own, which are torch's like any other, and the settings of all that a run knows by name."""

from collections.abc import Callable

from farflung.optimizers.adam import AdamSettings, AdamWSettings
from farflung.optimizers.lars import Lars, LarsSettings
from farflung.optimizers.sgd import SGDSettings
from farflung.optimizers.sign_sgd import SignSGD, SignSGDSettings
from farflung.types import OptimizerFactory

__all__ = [
    "OPTIMIZERS",
    "AdamSettings",
    "AdamWSettings",
    "Lars",
    "LarsSettings",
    "SGDSettings",
    "SignSGD",
    "SignSGDSettings",
]

OPTIMIZERS: dict[str, Callable[..., OptimizerFactory]] = {
    "adam": AdamSettings,
    "adamw": AdamWSettings,
    "lars": LarsSettings,
    "sgd": SGDSettings,
    "sign_sgd": SignSGDSettings,
}
"""What makes each, by name, from the settings that only it has."""
