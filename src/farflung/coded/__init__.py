"""Coded training: linear models on devices that may vanish at any moment, with exact answers."""

import warnings

from farflung.coded.codes import (
    CODES,
    MAX_CONDITION,
    MDS,
    RLNC,
    Code,
    Decoder,
    Plan,
    Plans,
    combination,
    rank,
    redundancy,
)
from farflung.coded.linear_model import (
    HeldProducts,
    Hinge,
    LinearModel,
    Logistic,
    Multinomial,
    Objective,
    Problem,
    Products,
    SquaredHinge,
)
from farflung.coded.preconditioner import ColumnStats, Preconditioner
from farflung.coded.solvers import GD, LBFGS, SOLVERS, Iterate, OneVsRest, Solver, solve

__all__ = [
    "CODES",
    "GD",
    "LBFGS",
    "MAX_CONDITION",
    "MDS",
    "RLNC",
    "SOLVERS",
    "Code",
    "ColumnStats",
    "Decoder",
    "HeldProducts",
    "Hinge",
    "Iterate",
    "LinearModel",
    "Logistic",
    "Multinomial",
    "Objective",
    "OneVsRest",
    "Plan",
    "Plans",
    "Preconditioner",
    "Problem",
    "Products",
    "Solver",
    "SquaredHinge",
    "combination",
    "rank",
    "redundancy",
    "solve",
]


def __getattr__(name: str) -> object:
    """Gives what stands in place of a name of 0.1, with a warning; until 0.3."""
    if name != "Bundle":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("farflung.coded.Bundle is now LBFGS, for the hinge too", FutureWarning, stacklevel=2)
    return LBFGS
