"""Coded training: linear models on devices that may vanish at any moment, with exact answers."""

from farflung.coded.codes import (
    CODES,
    MAX_CONDITION,
    MDS,
    RLNC,
    Code,
    Decoder,
    Plan,
    compute_rank,
    compute_redundancy,
    find_combination,
)
from farflung.coded.linear_model import (
    Hinge,
    InMemoryProducts,
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
    "Hinge",
    "InMemoryProducts",
    "Iterate",
    "LinearModel",
    "Logistic",
    "Multinomial",
    "Objective",
    "OneVsRest",
    "Plan",
    "Preconditioner",
    "Problem",
    "Products",
    "Solver",
    "SquaredHinge",
    "compute_rank",
    "compute_redundancy",
    "find_combination",
    "solve",
]
