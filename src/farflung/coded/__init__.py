"""Coded training: linear models on devices that may vanish at any moment, with exact answers."""

from farflung.coded.codes import CODES, MDS, RLNC, Code, Replication, Uncoded
from farflung.coded.decoder import MAX_CONDITION, Decoder
from farflung.coded.held import HeldProducts
from farflung.coded.objectives import Hinge, Logistic, Multinomial, Objective, SquaredHinge
from farflung.coded.plan import Plan, Plans
from farflung.coded.problem import Problem
from farflung.coded.products import Products
from farflung.coded.recombination import combination
from farflung.coded.redundancy import rank, redundancy
from farflung.coded.solvers import GD, LBFGS, SOLVERS, Bundle, Iterate, OneVsRest, Solver, solve

__all__ = [
    "CODES",
    "GD",
    "LBFGS",
    "MAX_CONDITION",
    "MDS",
    "RLNC",
    "SOLVERS",
    "Bundle",
    "Code",
    "Decoder",
    "HeldProducts",
    "Hinge",
    "Iterate",
    "Logistic",
    "Multinomial",
    "Objective",
    "OneVsRest",
    "Plan",
    "Plans",
    "Problem",
    "Products",
    "Replication",
    "Solver",
    "SquaredHinge",
    "Uncoded",
    "combination",
    "rank",
    "redundancy",
    "solve",
]
