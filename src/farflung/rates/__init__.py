"""Learning-rate schedules: how the rate changes with the steps or samples that all replicas have done."""

from collections.abc import Callable

from farflung.rates.constant import Constant
from farflung.rates.cosine import Cosine
from farflung.rates.falling import Falling
from farflung.rates.linear import Linear
from farflung.rates.step import Step
from farflung.rates.warm_up import WarmUp
from farflung.types import RateSchedule

__all__ = ["RATES", "Constant", "Cosine", "Falling", "Linear", "Step", "WarmUp"]

RATES: dict[str, Callable[..., RateSchedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "linear": Linear,
    "step": Step,
}
"""All of them by name."""
