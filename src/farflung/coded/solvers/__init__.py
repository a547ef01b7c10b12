"""Solvers of linear models on two products, one file each."""

from collections.abc import Callable
from typing import Any

from farflung.coded.solvers.base import Iterate, Solver, solve
from farflung.coded.solvers.gd import GD, GDState
from farflung.coded.solvers.lbfgs import LBFGS, LBFGSState
from farflung.coded.solvers.one_vs_rest import OneVsRest, OneVsRestState

__all__ = [
    "GD",
    "LBFGS",
    "SOLVERS",
    "GDState",
    "Iterate",
    "LBFGSState",
    "OneVsRest",
    "OneVsRestState",
    "Solver",
    "solve",
]

SOLVERS: dict[str, Callable[..., Solver[Any]]] = {"gd": GD, "lbfgs": LBFGS}
"""All of them by name."""
