"""Losses and penalties of linear models, one file each."""

from collections.abc import Callable

from farflung.coded.objectives.hinge import Hinge
from farflung.coded.objectives.interface import Objective
from farflung.coded.objectives.logistic import Logistic
from farflung.coded.objectives.multinomial import Multinomial
from farflung.coded.objectives.squared_hinge import SquaredHinge

__all__ = ["OBJECTIVES", "Hinge", "Logistic", "Multinomial", "Objective", "SquaredHinge"]

OBJECTIVES: dict[str, Callable[..., Objective]] = {
    "hinge": Hinge,
    "logistic": Logistic,
    "multinomial": Multinomial,
    "squared_hinge": SquaredHinge,
}
"""All of them by name."""
