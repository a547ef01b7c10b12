"""Coded training: linear models on devices that may vanish at any moment, with exact answers."""

from farflung.coded.held import HeldProducts
from farflung.coded.objectives import OBJECTIVES, Hinge, Logistic, Multinomial, Objective, SquaredHinge
from farflung.coded.problem import Problem
from farflung.coded.products import Products
from farflung.coded.solvers import GD, LBFGS, SOLVERS, Bundle, Iterate, OneVsRest, Solver, solve

__all__ = [
    "GD",
    "LBFGS",
    "OBJECTIVES",
    "SOLVERS",
    "Bundle",
    "HeldProducts",
    "Hinge",
    "Iterate",
    "Logistic",
    "Multinomial",
    "Objective",
    "OneVsRest",
    "Problem",
    "Products",
    "Solver",
    "SquaredHinge",
    "solve",
]
