"""Learning rates: how they change with what all replicas have done, and how they follow the size of a batch."""

from collections.abc import Callable

from farflung.rates.constant import Constant
from farflung.rates.cosine import Cosine
from farflung.rates.falling import Falling
from farflung.rates.linear import Linear
from farflung.rates.scaling import SCALINGS, LinearScaling, NoScaling, RootScaling
from farflung.rates.step import Step
from farflung.rates.warm_up import WarmUp
from farflung.types import RateSchedule

__all__ = [
    "RATES",
    "SCALINGS",
    "Constant",
    "Cosine",
    "Falling",
    "Linear",
    "LinearScaling",
    "NoScaling",
    "RootScaling",
    "Step",
    "WarmUp",
]

RATES: dict[str, Callable[..., RateSchedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "linear": Linear,
    "step": Step,
}
"""All of them by name."""
